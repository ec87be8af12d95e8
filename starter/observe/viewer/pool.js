// The page pool: whose pages are whose, and how full.

// Every page as a cell: its slots as columns, filled ones in the owner's colour; owners of a shared page lie in lanes.
class Pool {
  constructor(app) {
    this.app = app;
    this.tallest = 420;
  }

  layout(width) {
    const count = this.app.model.run.num_pages;
    const sizes = width < 560 ? [58, 46, 36, 26, 18, 12, 8] : [84, 74, 64, 54, 44, 34, 26, 20, 15, 11, 8];
    const rows = (size) => Math.ceil(count / this.perRow(size, width));
    const fits = (size) => rows(size) * (this.cellHeight(size) + this.gap(size)) <= 250;
    this.cell = sizes.find(fits) || sizes[sizes.length - 1];
    this.columns = this.perRow(this.cell, width);
    this.stretch = (width + this.gap(this.cell)) / this.columns - this.gap(this.cell); // cells fill the row
    if (count < this.columns) this.stretch = this.cell;
    this.height = this.cellHeight(this.cell);
    return Math.ceil(count / this.columns) * (this.height + this.gap(this.cell)) + 2;
  }

  gap(size) {
    return size > 40 ? 8 : size > 18 ? 5 : size > 10 ? 3 : 2;
  }

  perRow(size, width) {
    return Math.max(1, Math.floor((width + this.gap(size)) / (size + this.gap(size))));
  }

  cellHeight(size) {
    return size >= 44 ? 42 : size;
  }

  box(page, panel) {
    const gap = this.gap(this.cell);
    const x = (page % this.columns) * (this.stretch + gap);
    const y = Math.floor(page / this.columns) * (this.height + gap) - panel.scroll + 1;
    return [x, y, this.stretch, this.height];
  }

  pageAt(x, y) {
    const gap = this.gap(this.cell);
    const column = Math.floor(x / (this.stretch + gap)), row = Math.floor(y / (this.height + gap));
    const page = row * this.columns + column;
    return column < this.columns && page >= 0 && page < this.app.model.run.num_pages ? page : null;
  }

  base(context, panel) {
    for (let page = 0; page < this.app.model.run.num_pages; page++) {
      const box = this.box(page, panel);
      if (box[1] + box[3] < 0) continue;
      if (box[1] > panel.height) break;
      this.paintPage(context, page, ...box);
    }
  }

  paintPage(context, page, x, y, width, height) {
    const use = this.app.pages.get(page);
    context.globalAlpha = this.app.followsPage(page) ? 1 : DIM;
    const {model, state, followedPage} = this.app, head = height >= 42 ? 16 : 0;
    if (head) this.paintHead(context, page, use, x, y, width);
    const top = y + head, tall = height - head;
    if (use) {
      const hues = use.owners.map((request) => hueOf(model.requests[request]));
      paintSlots(context, use, hues, model.run.page_size, x, top, width, tall);
    } else {
      paintEmpty(context, state.published.has(page), x, top, width, tall);
    }
    if (use && state.touched.has(page)) this.ring(context, theme.ink, 1.2, x, top, width, tall);
    if (followedPage === page) this.ring(context, theme.accent, 2.2, x - 1, top - 1, width + 2, tall + 2);
    context.globalAlpha = 1;
  }

  paintHead(context, page, use, x, y, width) {
    context.textBaseline = "middle";
    context.textAlign = "left";
    context.font = `10px ${theme.mono}`;
    context.fillStyle = theme.muted;
    context.fillText(page, x + 1, y + 7);
    if (!use) return;
    const number = context.measureText(`${page} `).width + 2;
    const lives = use.owners.map((request) => this.app.model.requests[request]);
    const badge = lives.length > 1 ? `×${lives.length}` : "";
    context.font = `600 10px ${theme.mono}`;
    const badgeWidth = badge ? context.measureText(badge).width + 3 : 0;
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    if (badge) context.fillText(badge, x + width - 1, y + 7);
    context.font = `10px ${theme.mono}`;
    context.textAlign = "left";
    const name = lives.map((life) => life.id).join(" ");
    context.fillText(clipText(context, name, width - number - badgeWidth - 2), x + number, y + 7);
  }

  ring(context, colour, weight, x, y, width, height) {
    context.strokeStyle = colour;
    context.lineWidth = weight;
    roundedBox(context, x, y, width, height, Math.min(4, width / 4));
    context.stroke();
  }
}

// Slots as columns: filled ones full, those this step writes hatched, reserved ones faint; a lane for each owner.
function paintSlots(context, use, hues, size, x, y, width, height) {
  const alpha = context.globalAlpha, lanes = hues.slice(0, 4);
  context.save();
  roundedBox(context, x, y, width, height, Math.min(4, width / 4));
  context.clip();
  context.fillStyle = theme.slot;
  context.fillRect(x, y, width, height);
  lanes.forEach((hue, lane) => {
    const top = y + (lane * height) / lanes.length, tall = height / lanes.length;
    context.fillStyle = hue;
    context.globalAlpha = alpha * 0.17;
    context.fillRect(x, top, width, tall);
    context.globalAlpha = alpha;
    context.fillRect(x, top, (width * use.filled) / size, tall);
  });
  const fresh = (width * use.fresh) / size, end = x + (width * use.filled) / size;
  if (use.fresh) hatch(context, theme.card, end - fresh, y, fresh, height, 0.55);
  context.fillStyle = theme.card;
  const slots = width / size >= 4 ? size : 1, apart = height > 9 ? lanes.length : 1;
  for (let slot = 1; slot < slots; slot++) context.fillRect(x + (slot * width) / size - 0.5, y, 1, height);
  for (let lane = 1; lane < apart; lane++) context.fillRect(x, y + (lane * height) / apart - 0.5, width, 1);
  context.restore();
  context.globalAlpha = alpha;
}

// A page without an owner; a cached one still holds what it held.
function paintEmpty(context, cached, x, y, width, height) {
  context.save();
  roundedBox(context, x + 0.5, y + 0.5, width - 1, height - 1, Math.min(4, width / 4));
  if (cached) {
    context.fillStyle = theme.slot;
    context.fill();
    context.clip();
    hatch(context, theme.faint, x, y, width, height, 0.8);
  }
  context.restore();
  context.strokeStyle = cached ? theme.faint : theme.line;
  context.lineWidth = 1;
  context.setLineDash(cached || width < 16 ? [] : [3, 3]);
  roundedBox(context, x + 0.5, y + 0.5, width - 1, height - 1, Math.min(4, width / 4));
  context.stroke();
  context.setLineDash([]);
}
