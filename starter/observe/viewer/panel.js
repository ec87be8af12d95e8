// What the pictures share: colours, and a panel of two canvases on top of each other. The base is painted when its
// content changes, the top (the playhead) at every step, so that playing stays smooth.
//
// A picture has layout(width) -> the height it wants; base(context, panel); and top(context, panel), if anything moves.

const HUES = 10;
const theme = {asked: null}; // "light" or "dark", where the reader chose it; else as the system prefers

function readTheme() {
  const root = document.documentElement, system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  root.dataset.theme = theme.asked || system;
  const style = getComputedStyle(root);
  for (const name of ["ink", "muted", "faint", "line", "card", "slot", "accent", "warn"]) {
    theme[name] = style.getPropertyValue(`--${name}`).trim();
  }
  theme.hues = Array.from({length: HUES}, (_, i) => style.getPropertyValue(`--hue${i}`).trim());
  theme.sans = style.getPropertyValue("--sans").trim();
  theme.mono = style.getPropertyValue("--mono").trim();
}

const hueOf = (life) => (life.outside ? theme.muted : theme.hues[life.hue]);
const DIM = 0.22; // what is not followed

// A box with two canvases that stay in view while taller content scrolls under them.
class Panel {
  constructor(box, picture) {
    this.box = box;
    this.picture = picture;
    this.spacer = box.appendChild(document.createElement("div"));
    this.spacer.className = "spacer";
    this.holder = this.spacer.appendChild(document.createElement("div"));
    this.holder.className = "layers";
    this.layers = [0, 1].map(() => this.holder.appendChild(document.createElement("canvas")));
    this.painted = 0; // times the base was painted
    this.scroll = 0; // kept here, because to ask the box would lay the whole page out
    box.addEventListener("scroll", () => {
      if (Math.abs(box.scrollTop - this.scroll) < 1) return; // our own doing
      this.scroll = box.scrollTop;
      this.paint();
    });
    new ResizeObserver(() => this.fit()).observe(box);
  }

  // Take the box's size; repaint everything.
  fit() {
    const content = this.picture.layout(this.box.clientWidth);
    this.content = content;
    this.spacer.style.height = `${content}px`;
    this.width = this.box.clientWidth;
    this.height = Math.min(content, this.picture.tallest || content);
    this.scroll = Math.max(0, Math.min(this.scroll, content - this.height));
    this.box.style.height = this.holder.style.height = `${this.height}px`;
    const scale = window.devicePixelRatio || 1;
    for (const layer of this.layers) {
      layer.width = Math.round(this.width * scale);
      layer.height = Math.round(this.height * scale);
      layer.style.width = `${this.width}px`;
      layer.style.height = `${this.height}px`;
      layer.getContext("2d").setTransform(scale, 0, 0, scale, 0, 0);
    }
    this.paint();
  }

  clear(layer) {
    const context = this.layers[layer].getContext("2d");
    context.clearRect(0, 0, this.width, this.height);
    context.globalAlpha = 1;
    return context;
  }

  paint() {
    if (!this.width) return;
    this.painted++;
    this.picture.base(this.clear(0), this);
    this.paintTop();
  }

  paintTop() {
    if (this.width && this.picture.top) this.picture.top(this.clear(1), this);
  }

  scrollTo(top) {
    this.scroll = Math.max(0, Math.min(top, this.content - this.height));
    requestAnimationFrame(() => { this.box.scrollTop = this.scroll; });
  }

  // A pointer event's place in the content.
  place(event) {
    const rectangle = this.holder.getBoundingClientRect();
    return [event.clientX - rectangle.left, event.clientY - rectangle.top + this.scroll];
  }
}

function clipText(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(text.slice(0, length) + "…").width > width) length--;
  return text.slice(0, length) + "…";
}

function roundedBox(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, Math.max(0, Math.min(radius, width / 2, height / 2)));
}

function hatch(context, colour, x, y, width, height, weight) {
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = weight * 1.6;
  context.beginPath();
  for (let at = x - height; at < x + width; at += 5) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}
