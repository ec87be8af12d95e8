// The cards made of words: this step, and the block tables.

class StepCard {
  constructor(app) {
    this.app = app;
    this.rows = new Rows(byId("reasons"));
  }

  draw() {
    const {now, state} = this.app, chunks = chunksOf(now);
    const scheduled = chunks.reduce((sum, chunk) => sum + chunk.count, 0);
    const {run, requests} = this.app.model;
    const clock = run.step_seconds ? "" : say("clock", {time: this.app.time(now.time - run.began)});
    byId("step-title").replaceChildren(this.app.stepName(this.app.frame), element("small", {}, clock));
    byId("budget").hidden = Boolean(now.end);
    byId("budget").replaceChildren(...chunks.map((chunk) => this.budgetPart(chunk, now.budget)));
    const live = requests.filter((life) => !life.outside && life.finished === undefined).length;
    byId("budget-text").textContent = now.end ? say(live ? "cut" : "over", {n: live}) : !scheduled ? say("nothing")
      : say("computes", {n: scheduled, budget: now.budget});
    this.out = new Map((now.out || []).map(([request, token, text]) => [request, text === "" ? `#${token}` : text]));
    this.group = new Map(); // request -> its group; the most important first
    const groups = {preempted: now.preempted || [], running: now.running || [], waiting: state.waiting};
    for (const [group, requests] of Object.entries(groups)) {
      requests.forEach((request) => this.group.has(request) || this.group.set(request, group));
    }
    this.rows.show([...this.group.keys()], 60,
      (request) => JSON.stringify([this.group.get(request), this.reason(request), this.out.get(request), this.app.look(request)]),
      (request) => this.row(request));
  }

  // A chunk as a part of the budget, as wide as its share.
  budgetPart({request, count, phase}, budget) {
    const life = this.app.model.requests[request], hue = hueOf(life), share = (100 * count) / Math.max(budget, 1);
    const full = phase === DECODE;
    return element("button", {
      title: `${life.id}: ${say("tokens", {n: count})}, ${say(this.app.model.phases[phase])}`, tabindex: -1,
      class: this.app.follows(request) ? "" : "dim", onclick: () => this.app.toggleRequest(request),
      style: {width: `${share}%`, color: full ? inkOn(hue) : theme.ink, "box-shadow": `inset 0 0 0 1px ${hue}`,
        background: full ? hue : `color-mix(in srgb, ${hue} 36%, ${theme.card})`},
    }, share > 14 ? `${life.id} ${count}` : share > 5 ? `${count}` : "");
  }

  reason(request) {
    if (this.app.reasons.has(request)) return reasonText(this.app.reasons.get(request));
    const place = this.app.state.waiting.indexOf(request);
    return place >= 0 ? say("queued", {n: place}) : say("idle");
  }

  row(request) {
    const life = this.app.model.requests[request];
    const followed = request === this.app.followedRequest ? "followed" : "";
    return element("li", {}, element("button", {
      class: `${this.group.get(request)} ${followed}`, "data-request": request,
      onclick: () => this.app.toggleRequest(request),
    }, dot(life), idOf(life), element("span", {class: "why"}, this.reason(request)),
    this.out.has(request) ? element("span", {class: "out"}, visible(this.out.get(request))) : null));
  }
}

class TablesCard {
  constructor(app) {
    this.app = app;
    this.rows = new Rows(byId("tables"));
  }

  draw() {
    const {state, pages, followedRequest} = this.app;
    const holders = [...state.tables.keys()].sort((a, b) => (b === followedRequest) - (a === followedRequest) || a - b);
    const users = (request) => state.table(request).map((page) => `${page}×${pages.get(page).owners.length}`);
    this.rows.show(holders, 48,
      (request) => JSON.stringify([users(request), state.computed.get(request), this.app.look(request)]),
      (request) => this.row(request));
  }

  row(request) {
    const {model, state} = this.app, life = model.requests[request], size = model.run.page_size;
    const computed = state.computed.get(request) || 0, table = state.table(request), most = 96;
    const chips = table.slice(0, most).map((page, index) => {
      const filled = Math.max(0, Math.min(size, computed - index * size));
      return this.chip(page, hueOf(life), (100 * filled) / size);
    });
    if (table.length > most) chips.push(element("span", {class: "more"}, say("more", {n: table.length - most})));
    const note = life.outside ? say("outside") : say("slots", {a: computed, b: table.length * size});
    const look = `table ${this.app.follows(request) ? "" : "dim"}`;
    return element("div", {class: look, onclick: () => this.app.toggleRequest(request)},
      dot(life), idOf(life), element("span", {class: "pages"}, ...chips), element("span", {class: "state"}, note));
  }

  chip(page, hue, fill) {
    const owners = this.app.pages.get(page).owners.length;
    const follow = (event) => {
      event.stopPropagation();
      this.app.togglePage(page);
    };
    return element("button", {
      class: `chip ${owners > 1 ? "shared" : ""} ${page === this.app.followedPage ? "followed" : ""}`,
      "data-page": page, style: {"--hue": hue, "--fill": `${fill}%`}, onclick: follow,
    }, owners > 1 ? `${page}×${owners}` : `${page}`);
  }
}
