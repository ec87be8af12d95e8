// The run, made walkable: the state of pages and tables at any frame.
//
//     const replay = new Replay(model);  replay.seek(120);  replay.state.tables.get(3)   -> the pages of request 3
//
// A frame says what changed since the one before (see starter/report.py), so a state is reached by applying frames in
// order. Every SPACING frames the state is kept as a checkpoint: a jump to anywhere applies at most SPACING frames.

const SPACING = 64;
const [WAITING, PREFILL, DECODE, PREEMPTED, IDLE] = [0, 1, 2, 3, 4]; // model.phases

class State {
  constructor() {
    this.tables = new Map(); // request -> its pages; arrays are replaced, never changed, so that copies can share them
    this.published = new Set(); // pages whose content can be found
    this.computed = new Map(); // request -> tokens in its pages once this step is computed
    this.swapped = new Set(); // requests whose tokens are in host pages
    this.waiting = []; // in the order of the queue
    this.touched = new Set(); // pages that this frame gave away
  }

  copy() {
    const other = new State();
    other.tables = new Map(this.tables);
    other.published = new Set(this.published);
    other.computed = new Map(this.computed);
    other.swapped = new Set(this.swapped);
    other.waiting = this.waiting;
    return other;
  }

  apply(frame, model, heed) {
    this.touched = new Set();
    for (const op of frame.ops) {
      if (heed) heed(op, this); // before it happens
      const change = CHANGES[op[0]];
      if (change) change(this, op[1], op[2], model);
    }
    if (frame.waiting) this.waiting = frame.waiting;
    if (frame.end) this.waiting = [];
    for (const chunk of chunksOf(frame)) this.computed.set(chunk.request, chunk.start + chunk.count);
  }

  table(request) {
    return this.tables.get(request) || [];
  }

  setTable(request, pages) {
    if (pages.length) this.tables.set(request, pages);
    else this.tables.delete(request);
  }
}

// What each change of a block table does. Pages a holder has several times over (from outside) go one by one.
const CHANGES = {
  allocate: (state, request, pages) => addPages(state, request, pages),
  share: (state, request, pages, model) => {
    addPages(state, request, pages);
    if (!state.computed.has(request)) state.computed.set(request, pages.length * model.run.page_size);
  },
  copy: (state, request, [source, target]) => {
    state.setTable(request, state.table(request).map((page) => (page === source ? target : page)));
    state.touched.add(target);
  },
  release: (state, request, pages) => {
    dropPages(state, request, pages);
    state.computed.delete(request);
    state.swapped.delete(request);
  },
  swap_out: (state, request, pages) => {
    dropPages(state, request, pages);
    state.swapped.add(request);
  },
  swap_in: (state, request, pages) => {
    addPages(state, request, pages);
    state.swapped.delete(request);
  },
  publish: (state, request, pages) => pages.forEach((page) => state.published.add(page)),
  evict: (state, request, pages) => pages.forEach((page) => state.published.delete(page)),
  fork: (state, request, _, model) => {
    const parent = state.computed.get(model.requests[request].parent);
    if (parent !== undefined) state.computed.set(request, parent);
  },
  finish: (state, request) => {
    state.computed.delete(request);
    state.swapped.delete(request);
  },
};

function addPages(state, request, pages) {
  state.setTable(request, [...state.table(request), ...pages]);
  pages.forEach((page) => state.touched.add(page));
}

function dropPages(state, request, pages) {
  const left = [...state.table(request)];
  for (const page of pages) {
    const place = left.lastIndexOf(page);
    if (place >= 0) left.splice(place, 1);
  }
  state.setTable(request, left);
}

class Replay {
  // heed(op, state, frame) sees every change once, in order, while the checkpoints are made.
  constructor(model, heed = null) {
    this.model = model;
    this.checkpoints = [];
    this.replayed = 0; // frames applied by the last seek
    const state = new State();
    model.frames.forEach((frame, number) => {
      state.apply(frame, model, heed && ((op, before) => heed(op, before, number)));
      if (number % SPACING === 0) this.checkpoints.push(Object.assign(state.copy(), {touched: state.touched}));
    });
    this.frame = -1;
    this.seek(0);
  }

  seek(frame) {
    const base = Math.floor(frame / SPACING);
    const onTheWay = this.frame >= base * SPACING && this.frame <= frame; // walking on is shorter than a jump
    if (!onTheWay) {
      this.state = Object.assign(this.checkpoints[base].copy(), {touched: this.checkpoints[base].touched});
      this.frame = base * SPACING;
    }
    this.replayed = frame - this.frame;
    while (this.frame < frame) this.state.apply(this.model.frames[++this.frame], this.model);
    return this.state;
  }
}

function chunksOf(frame) {
  const chunks = [];
  for (let i = 0; frame.chunks && i < frame.chunks.length; i += 4) {
    const [request, start, count, phase] = frame.chunks.slice(i, i + 4);
    chunks.push({request, start, count, phase});
  }
  return chunks;
}

// page -> {owners: [request, ...], filled, fresh}: filled slots, and how many of them this step writes.
function pagesInUse(state, frame, size) {
  const pages = new Map();
  const starts = new Map(chunksOf(frame).map((chunk) => [chunk.request, chunk.start]));
  for (const [request, table] of state.tables) {
    const computed = state.computed.get(request) || 0;
    const start = starts.has(request) ? starts.get(request) : computed;
    table.forEach((page, index) => {
      const inPage = (tokens) => Math.max(0, Math.min(size, tokens - index * size));
      const use = pages.get(page) || {owners: [], filled: 0, fresh: 0};
      use.owners.push(request);
      use.filled = Math.max(use.filled, inPage(computed));
      use.fresh = Math.max(use.fresh, inPage(computed) - inPage(start));
      pages.set(page, use);
    });
  }
  return pages;
}

// The engine's sentences of a frame: request -> text. Numbers are stored beside the sentence (see report.py).
function reasonsOf(model, frame) {
  const reasons = frame.why || [];
  return new Map(reasons.map(([request, sentence, ...numbers]) => [request, unfold(model, sentence, numbers)]));
}

function unfold(model, sentence, numbers) {
  let next = 0;
  return model.sentences[sentence].replace(/\0/g, (gap) => (next < numbers.length ? numbers[next++] : gap));
}

// A request's phase in a frame, or -1 before it came and after it ended.
function phaseAt(request, frame) {
  const span = request.spans.find(([from, to]) => from <= frame && frame <= to);
  return span ? span[2] : -1;
}

// Hues so that requests which hold pages at the same time differ while hues last: each takes the one whose last
// owner ended first.
function assignHues(model, hues) {
  const freeFrom = new Array(hues).fill(-1);
  const starts = model.requests.map((request, number) => {
    const active = request.spans.find((span) => span[2] !== WAITING);
    return [active ? active[0] : request.submitted, number];
  });
  starts.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
  for (const [, number] of starts) {
    const request = model.requests[number];
    const hue = freeFrom.indexOf(Math.min(...freeFrom));
    const spans = request.spans;
    request.hue = hue;
    freeFrom[hue] = Math.max(freeFrom[hue] + 1, spans.length ? spans[spans.length - 1][1] : request.submitted);
  }
}
