// The Gantt chart: who was in which phase when.

// A row for each request, a column for each step. The form says the phase, the colour whose it is:
// thin grey line: waits; dashes: preempted; light bar: prefill; full bar: decode; thin coloured line: not its turn.
class Gantt {
  constructor(app) {
    this.app = app;
    this.rows = app.model.requests.map((_, number) => number).filter((number) => !app.model.requests[number].outside);
    this.zoom = Math.max(1, app.model.frames.length / 450); // a step stays wide enough to be seen
    this.first = 0; // leftmost frame, where zoomed in
    this.tallest = 330;
    this.axis = 22;
  }

  layout(width) {
    this.left = width < 560 ? 76 : 112;
    const room = (this.tallest - this.axis) / Math.max(1, this.rows.length);
    this.row = Math.max(14, Math.min(26, room));
    this.plot = Math.max(10, width - this.left - 8);
    this.column = (this.plot / this.app.model.frames.length) * this.zoom;
    this.first = Math.max(0, Math.min(this.first, this.app.model.frames.length * (1 - 1 / this.zoom)));
    return Math.max(60, this.axis + this.rows.length * this.row + 4);
  }

  x(frame) {
    return this.left + (frame - this.first) * this.column;
  }

  y(row, panel) {
    return this.axis + row * this.row - panel.scroll;
  }

  frameAt(x) {
    const frame = Math.floor((x - this.left) / this.column + this.first);
    return Math.max(0, Math.min(this.app.model.frames.length - 1, frame));
  }

  rowAt(y) {
    const row = Math.floor((y - this.axis) / this.row);
    return row >= 0 && row < this.rows.length ? this.rows[row] : null;
  }

  base(context, panel) {
    const from = Math.max(0, Math.floor((panel.scroll - this.axis) / this.row));
    const to = Math.min(this.rows.length, Math.ceil((panel.scroll + panel.height) / this.row));
    this.paintAxis(context, panel);
    context.save();
    context.beginPath();
    context.rect(0, this.axis, panel.width, panel.height);
    context.clip();
    for (let row = from; row < to; row++) this.paintRow(context, this.rows[row], this.y(row, panel));
    context.restore();
  }

  paintAxis(context, panel) {
    const frames = this.app.model.frames;
    const steps = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6];
    const every = steps.find((n) => n * this.column >= 46) || 1e7;
    context.font = `11px ${theme.sans}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (let frame = Math.ceil(this.first / every) * every; frame < frames.length; frame += every) {
      const x = this.x(frame) + this.column / 2;
      if (x > panel.width - 12) break;
      context.fillStyle = theme.line;
      context.fillRect(Math.round(x), this.axis - 4, 1, panel.height);
      context.fillStyle = theme.muted;
      context.fillText(frames[frame].step, x, 9);
    }
  }

  paintRow(context, number, y) {
    const life = this.app.model.requests[number];
    const followed = this.app.follows(number);
    const middle = y + this.row / 2;
    context.globalAlpha = followed ? 1 : DIM + 0.1;
    context.font = `${number === this.app.followedRequest ? "600 " : ""}12px ${theme.mono}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillStyle = hueOf(life);
    roundedBox(context, 2, middle - 4, 8, 8, 2.5);
    context.fill();
    context.fillStyle = theme.ink;
    context.fillText(clipText(context, life.id, this.left - 26), 16, middle + 0.5);
    context.save();
    context.beginPath();
    context.rect(this.left, y, this.plot + 8, this.row);
    context.clip();
    for (const [from, to, phase] of life.spans) {
      const x = this.x(from), width = Math.max(0.7, (to - from + 1) * this.column);
      if (x + width < this.left || x > this.left + this.plot) continue;
      paintSpan(context, hueOf(life), phase, x, middle, width, Math.round(this.row * 0.56), this.column);
    }
    if (this.app.pageStory) this.paintHolding(context, number, y);
    this.paintEnd(context, life, middle);
    context.restore();
    context.globalAlpha = 1;
  }

  // While it had the page that is followed.
  paintHolding(context, number, y) {
    context.fillStyle = theme.accent;
    for (const {owners, from, to} of this.app.pageStory) {
      const width = Math.max(1, (to - from + 1) * this.column);
      if (owners.includes(number)) context.fillRect(this.x(from), y + this.row - 3, width, 2);
    }
  }

  // How it ended: a dot, or a cross where it was cancelled or failed.
  paintEnd(context, life, middle) {
    if (life.finished === undefined || this.column < 2) return;
    const x = this.x(life.finished) + Math.min(6, this.column / 2);
    const bad = life.reason === "cancelled" || life.reason === "error";
    context.strokeStyle = context.fillStyle = bad ? theme.warn : hueOf(life);
    context.lineWidth = 1.8;
    context.beginPath();
    if (bad) {
      context.moveTo(x - 3, middle - 3);
      context.lineTo(x + 3, middle + 3);
      context.moveTo(x + 3, middle - 3);
      context.lineTo(x - 3, middle + 3);
      context.stroke();
    } else {
      context.arc(x, middle, 2.6, 0, 7);
      context.fill();
    }
  }

  top(context, panel) {
    const x = this.x(this.app.frame), width = Math.max(2, this.column);
    if (x + width < this.left || x > panel.width) return;
    context.fillStyle = theme.accent;
    context.globalAlpha = 0.14;
    context.fillRect(x, this.axis - 4, width, panel.height);
    context.globalAlpha = 1;
    context.fillRect(Math.round(x + width / 2) - 0.75, this.axis - 4, 1.5, panel.height);
    const label = this.app.stepNumber(this.app.frame);
    context.font = `600 11px ${theme.sans}`;
    const half = context.measureText(label).width / 2 + 6;
    const middle = Math.max(half, Math.min(panel.width - half, x + width / 2));
    roundedBox(context, middle - half, 1, half * 2, 17, 5);
    context.fill();
    context.fillStyle = theme.card;
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(label, middle, 10);
  }

  zoomBy(factor, frame) {
    const {length} = this.app.model.frames;
    this.zoom = Math.max(1, Math.min(length / 8, this.zoom * factor));
    this.first = Math.max(0, frame - length / this.zoom / 2);
  }

  // Keep the playhead, and what runs, in view. True if the base has to be painted again.
  show(frame, panel) {
    if (!panel.width) return false; // not laid out yet
    const shown = this.plot / this.column;
    const first = this.first;
    this.scrolled = false;
    if (frame < first || frame >= first + shown - 1) this.first = frame - shown / 3;
    this.first = Math.max(0, Math.min(this.first, this.app.model.frames.length - shown));
    const {followedRequest, model} = this.app;
    const wanted = followedRequest !== null ? [followedRequest] : model.frames[frame].running || [];
    this.scrollTo(wanted.map((request) => this.rows.indexOf(request)).filter((row) => row >= 0), panel);
    return this.scrolled || this.first !== first;
  }

  scrollTo(rows, panel) {
    if (!rows.length || !panel.width) return;
    const top = Math.min(...rows) * this.row, bottom = (Math.max(...rows) + 1) * this.row;
    const room = panel.height - this.axis;
    if (top >= panel.scroll && bottom <= panel.scroll + room) return;
    if (bottom - top > room && top >= panel.scroll && top < panel.scroll + room / 2) return;
    panel.scrollTo(Math.min(top - this.row, bottom - room + this.row * 3));
    this.scrolled = true;
  }
}

// A stretch of a phase: a bar while it computes, else a line.
function paintSpan(context, hue, phase, x, middle, width, height, column = 0) {
  if (phase === PREFILL || phase === DECODE) {
    paintBar(context, hue, phase, x, middle - height / 2, width, height, column);
    return;
  }
  context.strokeStyle = phase === IDLE ? hue : phase === PREEMPTED ? theme.warn : theme.faint;
  context.lineWidth = phase === PREEMPTED ? 3 : 2;
  context.setLineDash(phase === PREEMPTED ? [4, 3] : []);
  context.beginPath();
  context.moveTo(x + 0.5, middle);
  context.lineTo(x + width - 0.5, middle);
  context.stroke();
  context.setLineDash([]);
}

// A bar of a phase; where there is room, its steps are drawn apart.
function paintBar(context, hue, phase, x, y, width, height, column) {
  const alpha = context.globalAlpha;
  context.fillStyle = context.strokeStyle = hue;
  roundedBox(context, x, y, width, height, 2.5);
  if (phase === DECODE) {
    context.fill();
  } else {
    context.globalAlpha = alpha * 0.3;
    context.fill();
    context.globalAlpha = alpha;
    if (width > 3) {
      context.lineWidth = 1;
      roundedBox(context, x + 0.5, y + 0.5, width - 1, height - 1, 2.5);
      context.stroke();
    }
  }
  if (column < 6) return;
  context.fillStyle = theme.card;
  context.globalAlpha = alpha * 0.75;
  for (let line = x + column; line < x + width - 1; line += column) context.fillRect(line - 0.5, y, 1, height);
  context.globalAlpha = alpha;
}
