// What happened, as sentences: the biography of every request and of every page, gathered in one pass over the frames.
//
// An entry is {request, kind, from, to, ...values}: language-neutral, put into words by storyText. `notable` is the list
// of entries that get a sentence while no request is followed.

const NOTABLE = new Set(["finds", "forks", "copies", "swapsIn", "cancel", "error", "refuse", "fault", "holds"]);

class Stories {
  constructor(model) {
    this.model = model;
    this.of = model.requests.map(() => []); // request -> its entries
    this.shares = model.requests.map(() => new Map()); // request -> other request -> set of pages they shared
    this.loose = []; // entries of no request
    this.waits = []; // whole waits, whatever the reasons in between: {request, from, to, parts}
    this.waiting = new Map(); // request -> its wait that lasts
    this.replay = new Replay(model, (op, before, frame) => this.heed(op, before, frame));
    this.open = new Map(); // request -> the entry that goes on while it does the same
    model.frames.forEach((frame, number) => this.follow(frame, number));
    this.of.forEach((entries) => entries.sort((a, b) => a.from - b.from || RANK(a) - RANK(b)));
    this.notable = [...this.of.flat(), ...this.loose].filter((entry) => NOTABLE.has(entry.kind));
    this.notable.push(...together(this.waits.map(inOneSentence)));
    this.notable.sort((a, b) => a.from - b.from || RANK(a) - RANK(b));
  }

  add(request, kind, frame, values = {}) {
    const entry = {request, kind, from: frame, to: frame, ...values};
    (request === null ? this.loose : this.of[request]).push(entry);
    return entry;
  }

  // One change of a frame, before it happens.
  heed([kind, about, more], before, frame) {
    const teller = TELLERS[kind];
    if (teller) teller(this, about, more, before, frame);
  }

  // What a frame's batch and queue say: waits, prefills and decodes become stretches of frames.
  follow(frame, number) {
    const reasons = new Map((frame.why || []).map(([request, ...reason]) => [request, reason]));
    const queue = frame.waiting || (frame.end ? [] : this.queue) || [];
    this.queue = queue;
    const preempted = new Set(frame.preempted || []);
    const speak = (request) => unfold(this.model, reasons.get(request)[0], reasons.get(request).slice(1));
    queue.forEach((request, place) => {
      const reason = reasons.get(request);
      let entry;
      const values = reason ? {reason: speak(request)} : {place};
      if (preempted.has(request)) entry = this.stretch(request, "preempt", "preempt", number, values);
      else entry = this.stretch(request, "wait", reason ? reason[0] : "queue", number, values);
      this.wait(request, entry, number);
    });
    for (const chunk of chunksOf(frame)) {
      const kind = chunk.phase === PREFILL ? "prefills" : "decodes";
      const life = this.model.requests[chunk.request];
      const entry = this.stretch(chunk.request, kind, kind, number, {n: 0, again: life.tokensSoFar > 0 || life.lost});
      entry.n += chunk.count;
      entry.frames = (entry.frames || 0) + 1;
    }
    preempted.forEach((request) => { this.model.requests[request].lost = true; });
    for (const [request, , text] of frame.out || []) {
      const life = this.model.requests[request];
      life.tokensSoFar = (life.tokensSoFar || 0) + 1;
      (life.output = life.output || []).push([number, text]);
    }
  }

  // One wait has several reasons on its way; all of them are parts of it.
  wait(request, part, frame) {
    let wait = this.waiting.get(request);
    if (!wait || wait.to < frame - 1 || part.kind === "preempt") {
      wait = {request, kind: part.kind, from: frame, to: frame, parts: []};
      this.waits.push(wait);
      this.waiting.set(request, wait);
    }
    wait.to = frame;
    if (wait.parts[wait.parts.length - 1] !== part) wait.parts.push(part);
  }

  stretch(request, kind, key, frame, values) {
    const open = this.open.get(request);
    if (open && open.key === key && kind !== "preempt") {
      open.to = frame;
      return open;
    }
    const entry = this.add(request, kind, frame, {key, ...values});
    this.open.set(request, entry);
    return entry;
  }

  share(request, pages, before) {
    const others = new Set();
    for (const [other, table] of before.tables) {
      const common = other === request ? [] : pages.filter((page) => table.includes(page));
      if (!common.length) continue;
      others.add(other);
      for (const [one, two] of [[request, other], [other, request]]) {
        const known = this.shares[one].get(two) || new Set();
        common.forEach((page) => known.add(page));
        this.shares[one].set(two, known);
      }
    }
    return [...others];
  }

  // The stretches of a page's life: [{from, to, owners, cached}]
  ofPage(page) {
    const state = new State();
    const entries = [];
    this.model.frames.forEach((frame, number) => {
      state.apply(frame, this.model);
      const owners = [...state.tables].filter(([, table]) => table.includes(page)).map(([request]) => request);
      const cached = !owners.length && state.published.has(page);
      const key = `${owners}/${cached}`;
      const last = entries[entries.length - 1];
      if (last && last.key === key) last.to = number;
      else entries.push({kind: "page", key, from: number, to: number, owners, cached});
    });
    return entries;
  }
}

// A whole wait, with its reason: how it was preempted, else the reason that lasted longest.
function inOneSentence({parts, ...wait}) {
  const lasted = (part) => (part.kind === "preempt" ? Infinity : part.reason ? part.to - part.from + 1 : 0);
  const {reason, place} = parts.reduce((main, part) => (lasted(part) > lasted(main) ? part : main));
  return {...wait, reason, place};
}

// Waits for the same reason that follow each other become one entry: a crowd behind a full batch is one sentence.
function together(waits) {
  const groups = [], open = new Map(); // by reason: the last group, which later waits may join
  for (const wait of waits) {
    const key = wait.kind === "preempt" ? null : wait.reason ?? "queue";
    const group = key !== null && open.get(key);
    if (group && wait.from <= group.to + 1) {
      group.members.push(wait);
      group.to = Math.max(group.to, wait.to);
      continue;
    }
    const started = {to: wait.to, members: [wait]};
    groups.push(started);
    if (key !== null) open.set(key, started);
  }
  return groups.flatMap(({to, members}) => (members.length < 3 ? members
    : [{...members[0], kind: "together", to, n: members.length - 1}]));
}

// What the list of the story shows of a kind; everything else is in "all".
const KINDS = {
  waits: new Set(["wait", "together"]), preempted: new Set(["preempt", "swapsOut", "swapsIn"]),
  sharing: new Set(["finds", "forks", "copies"]), ends: new Set(["ends", "cancel", "error", "refuse", "fault", "holds"]),
};

// Within a frame: arrivals first, then what the plan changed, then waits and work, then ends.
const ORDER = ["cancel", "error", "ends", "fault", "refuse", "submitted", "preempt", "swapsOut", "forks", "finds", "swapsIn",
  "evicts", "takes", "holds", "copies", "wait", "together", "prefills", "decodes"];
const RANK = (entry) => ORDER.indexOf(entry.kind);

const TELLERS = {
  submit: (stories, request, _, before, frame) => stories.add(request, "submitted", frame),
  fork: (stories, request, _, before, frame) => stories.add(request, "forks", frame, {pages: []}),
  share: (stories, request, pages, before, frame) => {
    const others = stories.share(request, pages, before);
    const last = stories.of[request][stories.of[request].length - 1];
    if (last && last.kind === "forks" && last.from === frame) last.pages = pages;
    else stories.add(request, "finds", frame, {pages, others});
  },
  allocate: (stories, request, pages, before, frame) => {
    const kind = stories.model.requests[request].outside ? "holds" : "takes";
    if (pages.length) stories.add(request, kind, frame, {pages});
  },
  copy: (stories, request, [source, target], before, frame) => stories.add(request, "copies", frame, {source, target}),
  evict: (stories, request, pages, before, frame) => stories.add(request, "evicts", frame, {pages}),
  swap_out: (stories, request, pages, before, frame) => stories.add(request, "swapsOut", frame, {pages}),
  swap_in: (stories, request, pages, before, frame) => stories.add(request, "swapsIn", frame, {pages}),
  cancel: (stories, request, _, before, frame) => stories.add(request, "cancel", frame),
  finish: (stories, request, _, before, frame) => {
    const life = stories.model.requests[request];
    stories.add(request, life.reason === "error" ? "error" : "ends", frame);
  },
  refuse: (stories, id, error, before, frame) => stories.add(null, "refuse", frame, {id, error}),
  fault: (stories, kind, about, before, frame) => stories.add(null, "fault", frame, {fault: kind, about}),
};

// An entry in words of the chosen language.
function storyText(model, entry) {
  const life = model.requests[entry.request] || {};
  const name = (request) => model.requests[request].id;
  const pages = entry.pages && pageWords(entry.pages);
  const values = {...entry, id: life.id, pages};
  const steps = entry.to - entry.from + 1;
  switch (entry.kind) {
    case "submitted": return say("submitted", {id: life.id, count: say("tokens", {n: life.prompt}), max: life.max});
    case "wait": case "preempt": {
      const reason = entry.reason ? reasonText(entry.reason) : say("queued", {n: entry.place});
      return say("waits", {id: life.id, reason}) + (steps > 1 ? say("waitsFor", {n: steps}) : "");
    }
    case "together": {
      const reason = entry.reason ? reasonText(entry.reason) : say("queued", {n: entry.place});
      return say("together", {id: life.id, n: entry.n, reason}) + say("waitsFor", {n: steps});
    }
    case "finds": {
      const count = say("tokens", {n: entry.pages.length * model.run.page_size});
      if (!entry.others.length) return say("findsCached", {...values, count});
      const others = entry.others.slice(0, 4).map(name).join(", ");
      const rest = entry.others.length > 4 ? ` ${say("more", {n: entry.others.length - 4})}` : "";
      return say("finds", {...values, count, others: others + rest});
    }
    case "forks": return say("forks", {...values, parent: name(life.parent)});
    case "copies": return say("copies", {...values, from: entry.source, to: entry.target});
    case "prefills": return say(entry.again ? "again" : "prefills", values)
      + (entry.frames > 1 ? say("prefillsIn", {n: entry.frames}) : "");
    case "ends": {
      const reason = ["stop", "length", "cancelled"].includes(life.reason) ? say(life.reason) : life.reason;
      return say("ends", {id: life.id, n: life.tokens, reason});
    }
    case "error": return say("error", {id: life.id, error: life.error || ""});
    case "refuse": return say("refuse", entry);
    case "fault": return say("fault", {kind: entry.fault, about: entry.about});
    case "page": return entry.owners.map(name).join(", ") || say(entry.cached ? "pageCached" : "pageFree");
    default: return say(entry.kind, values);
  }
}

// [3, 4, 5, 9] -> "pages 3–5, 9"
function pageWords(pages) {
  const parts = [];
  [...pages].sort((a, b) => a - b).forEach((page) => {
    const last = parts[parts.length - 1];
    if (last && last[1] === page - 1) last[1] = page;
    else parts.push([page, page]);
  });
  const list = parts.map(([from, to]) => (from === to ? `${from}` : `${from}${to === from + 1 ? ", " : "–"}${to}`));
  return say("pageList", {n: [...pages].length, list: list.join(", ")});
}
