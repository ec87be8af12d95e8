// Small helpers for elements, numbers and colours.

const byId = (id) => document.getElementById(id);

// element("li", {class: "x", onclick: f, style: {...}}, child, "text"): text is only ever set as text, never as HTML.
function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, setting]) => node.style.setProperty(key, setting));
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

// Rows of a list that did not change since they were last shown stay in place: laying out a page is what costs time.
// make(key) builds a row; sign(key) is equal as long as it would look the same; at most `most` rows are shown.
class Rows {
  constructor(list) {
    this.list = list;
    this.rows = new Map();
  }

  show(keys, most, sign, make) {
    const rows = new Map(keys.slice(0, most).map((key) => {
      const known = this.rows.get(key), signature = sign(key);
      return [key, known && known.signature === signature ? known : {signature, node: make(key)}];
    }));
    const nodes = [...rows.values()].map((row) => row.node);
    const tag = this.list.tagName === "UL" ? "li" : "div";
    if (keys.length > most) nodes.push(element(tag, {class: "more"}, say("more", {n: keys.length - most})));
    nodes.forEach((node, i) => {
      if (this.list.children[i] !== node) this.list.insertBefore(node, this.list.children[i] || null);
    });
    while (this.list.children.length > nodes.length) this.list.lastElementChild.remove();
    this.rows = rows;
  }
}

const dot = (life) => element("span", {class: "dot", style: {background: hueOf(life)}});
const idOf = (life) => element("span", {class: "id"}, life.id);

function setLabel(node, text) {
  node.title = text;
  node.setAttribute("aria-label", text);
}

// Black or white on a colour, whichever reads better (relative luminance, WCAG 2).
function inkOn(hex) {
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = [1, 3, 5].map((i) => linear(parseInt(hex.slice(i, i + 2), 16) / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.2 ? "#16181c" : "#ffffff";
}

const round = (value) => (Math.abs(value) >= 100 ? Math.round(value) : Number(value.toPrecision(3)));
const percent = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);
const visible = (text) => text.replace(/ /g, "␣").replace(/\n/g, "⏎");
const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : 0);
