// The page: it holds what is looked at (frame, who is followed, language, colours), and has everything drawn from that.

class App {
  constructor(model) {
    this.model = model;
    assignHues(model, HUES);
    this.stories = new Stories(model);
    this.replay = this.stories.replay;
    this.followedRequest = this.followedPage = this.pageStory = null;
    this.playing = false;
    this.themeNumber = 0; // counts changes of language and colours
    const place = this.readAddress();
    readTheme();
    this.gantt = new Panel(byId("gantt"), new Gantt(this));
    this.pool = new Panel(byId("pool"), new Pool(this));
    this.cards = [new StepCard(this), new TablesCard(this), new StoryCard(this)];
    this.charts = makeCharts(this);
    pointOnGantt(this, this.gantt);
    pointOnPool(this, this.pool);
    this.makeControls();
    this.translate();
    this.seek(place);
  }

  // ------------------------------------------------------------------------------------ where we are

  seek(frame) {
    this.frame = Math.max(0, Math.min(this.model.frames.length - 1, frame));
    this.now = this.model.frames[this.frame];
    this.state = this.replay.seek(this.frame);
    this.pages = pagesInUse(this.state, this.now, this.model.run.page_size);
    this.reasons = reasonsOf(this.model, this.now);
    this.draw();
  }

  jump(frame) {
    this.pause();
    this.seek(frame);
  }

  follow(request, page = null) {
    this.followedRequest = request;
    this.followedPage = page;
    this.pageStory = page === null ? null : this.stories.ofPage(page);
    this.draw();
    this.gantt.paint();
    this.charts.forEach(({panel}) => panel.paint());
  }

  toggleRequest(request) {
    this.follow(this.followedRequest === request ? null : request);
  }

  togglePage(page) {
    this.follow(null, this.followedPage === page ? null : page);
  }

  followNext(direction) {
    const {rows} = this.gantt.picture, outside = direction > 0 ? -1 : rows.length;
    const place = this.followedRequest === null ? outside : rows.indexOf(this.followedRequest);
    if (rows.length) this.follow(rows[(place + direction + rows.length) % rows.length]);
  }

  // By its id, or by the beginning or a part of it.
  find(words) {
    const ids = this.model.requests.map((life) => life.id);
    const tests = [(id) => id === words, (id) => id.startsWith(words), (id) => id.includes(words)];
    const found = words === "" ? -1 : tests.map((test) => ids.findIndex(test)).find((request) => request >= 0) ?? -1;
    byId("find").setAttribute("aria-invalid", String(words !== "" && found < 0));
    if (found >= 0 || words === "") this.follow(found < 0 ? null : found);
  }

  // After the last one, the first.
  nextPreempted() {
    const {frames} = this.model, has = (frame) => (frames[frame].preempted || []).length > 0;
    for (let i = 1; i <= frames.length; i++) {
      const frame = (this.frame + i) % frames.length;
      if (has(frame)) return this.jump(frame);
    }
    return undefined;
  }

  // Is this request to be shown in full colour?
  follows(request) {
    if (this.followedPage !== null) return this.pageStory.some((entry) => entry.owners.includes(request));
    return this.followedRequest === null || this.followedRequest === request;
  }

  followsPage(page) {
    if (this.followedPage !== null) return this.followedPage === page;
    return this.followedRequest === null || this.state.table(this.followedRequest).includes(page);
  }

  // What a request's row looks like depends on, apart from its text.
  look(request) {
    return [this.follows(request), this.followedRequest === request, this.followedPage, this.themeNumber];
  }

  // -------------------------------------------------------------------------------------------- draw

  draw() {
    byId("scrub").value = this.frame;
    byId("scrub").setAttribute("aria-valuetext", this.stepName(this.frame));
    const last = this.stepNumber(this.model.frames.length - 2);
    byId("readout").replaceChildren(this.stepName(this.frame), element("small", {}, ` / ${last}`));
    this.drawPlay();
    this.drawCounts();
    this.cards.forEach((card) => card.draw());
    this.pool.paint();
    if (this.gantt.picture.show(this.frame, this.gantt)) this.gantt.paint();
    else this.gantt.paintTop();
    this.charts.forEach(({panel, head}) => {
      head();
      panel.paintTop();
    });
    this.writeAddress();
  }

  drawPlay() {
    byId("play").classList.toggle("on", this.playing);
    setLabel(byId("play"), say(this.playing ? "pause" : "play"));
  }

  drawCounts() {
    const used = this.pages.size;
    const cached = [...this.state.published].filter((page) => !this.pages.has(page)).length;
    const shared = [...this.pages.values()].filter((use) => use.owners.length > 1).length;
    this.counts = {used, shared, cached, free: this.model.run.num_pages - used - cached};
    byId("pool-counts").textContent = say("poolCounts", this.counts);
  }

  drawLegends() {
    const legend = (id, items) => byId(id).replaceChildren(...items.map(([word, paint]) => {
      const canvas = element("canvas", {width: 44, height: 24}), context = canvas.getContext("2d");
      context.scale(2, 2);
      paint(context);
      return element("span", {}, canvas, term(word, say(word)));
    }));
    const [one, two] = theme.hues;
    legend("phases", [WAITING, PREEMPTED, PREFILL, DECODE, IDLE].map((phase) =>
      [this.model.phases[phase], (context) => paintSpan(context, one, phase, 0.5, 6, 21, 11)]));
    const slots = (hues, filled, fresh) => (context) => paintSlots(context, {filled, fresh}, hues, 4, 0, 0, 22, 12);
    const empty = (cached) => (context) => paintEmpty(context, cached, 0, 0, 22, 12);
    legend("page-states", [["used", slots([one], 4, 0)], ["written", slots([one], 3, 1)],
      ["reserved", slots([one], 0, 0)], ["shared", slots([one, two], 4, 0)], ["cached", empty(true)], ["free", empty(false)]]);
  }

  stepNumber(frame) {
    const {step, end} = this.model.frames[Math.max(0, frame)];
    return end ? say("end") : `${step}`;
  }

  stepName(frame) {
    const {step, end} = this.model.frames[frame];
    return end ? say("end") : say("stepNumber", {step});
  }

  // A virtual clock counts steps; a real one seconds.
  time(seconds) {
    if (seconds === null || seconds === undefined) return "–";
    const step = this.model.run.step_seconds;
    if (step) return say("steps", {n: round(seconds / step)});
    return seconds !== 0 && seconds < 1 ? `${round(seconds * 1000)} ms` : `${round(seconds)} s`;
  }

  // ---------------------------------------------------------------------------------------- controls

  makeControls() {
    const actions = {
      play: () => this.togglePlay(), first: () => this.jump(0), back: () => this.jump(this.frame - 1),
      forward: () => this.jump(this.frame + 1), last: () => this.jump(Infinity), unfollow: () => this.follow(null),
      "zoom-in": () => this.zoom(2), "zoom-out": () => this.zoom(0.5), language: () => this.switchLanguage(),
      theme: () => this.switchTheme(), help: () => this.toggleHelp(), "next-preempted": () => this.nextPreempted(),
    };
    byId("next-preempted").hidden = !this.model.frames.some((frame) => (frame.preempted || []).length);
    byId("kinds").addEventListener("change", () => this.draw());
    byId("ids").replaceChildren(...this.model.requests.slice(0, 500).map(({id}) => element("option", {value: id})));
    byId("find").addEventListener("change", () => this.find(byId("find").value.trim()));
    Object.entries(actions).forEach(([id, action]) => byId(id).addEventListener("click", action));
    byId("scrub").max = this.model.frames.length - 1;
    byId("scrub").addEventListener("input", () => this.jump(Number(byId("scrub").value)));
    document.addEventListener("keydown", (event) => this.onKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("select, input[type=search]")) return;
    if (event.key === " " && event.target.tagName === "BUTTON") return; // the button's own key
    const far = event.shiftKey ? 10 : 1;
    const actions = {
      " ": () => this.togglePlay(), Home: () => this.jump(0), End: () => this.jump(Infinity),
      ArrowRight: () => this.jump(this.frame + far), ArrowLeft: () => this.jump(this.frame - far),
      ArrowDown: () => this.followNext(1), ArrowUp: () => this.followNext(-1),
      Escape: () => this.follow(null), "+": () => this.zoom(2), "=": () => this.zoom(2), "-": () => this.zoom(0.5),
      l: () => this.switchLanguage(), t: () => this.switchTheme(), "?": () => this.toggleHelp(), p: () => this.nextPreempted(),
    };
    if (!(event.key in actions)) return;
    event.preventDefault();
    actions[event.key]();
  }

  togglePlay() {
    if (this.playing) {
      this.pause();
      return;
    }
    if (this.now.end) this.seek(0);
    this.playing = true;
    this.due = performance.now();
    this.drawPlay();
    requestAnimationFrame((time) => this.tick(time));
  }

  pause() {
    this.playing = false;
    this.drawPlay();
  }

  tick(time) {
    if (!this.playing) return;
    const every = 1000 / Number(byId("speed").value), frames = Math.floor((time - this.due) / every);
    if (frames > 0) {
      this.due += frames * every;
      this.seek(this.frame + frames);
    }
    if (this.now.end) this.jump(this.frame);
    else requestAnimationFrame((next) => this.tick(next));
  }

  zoom(factor) {
    this.gantt.picture.zoomBy(factor, this.frame);
    this.gantt.fit();
  }

  toggleHelp() {
    byId("keys").hidden = !byId("keys").hidden;
    byId("help").setAttribute("aria-expanded", String(!byId("keys").hidden));
  }

  // ------------------------------------------------------------------------------ language and colours

  switchLanguage() {
    setLanguage(language === "en" ? "zh" : "en");
    this.translate();
    this.repaint();
  }

  switchTheme() {
    theme.asked = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    this.repaint();
  }

  repaint() {
    readTheme();
    this.themeNumber++;
    this.drawLegends();
    this.draw();
    [this.gantt, ...this.charts.map(({panel}) => panel)].forEach((panel) => panel.paint());
  }

  translate() {
    document.documentElement.lang = language === "zh" ? "zh-CN" : "en";
    const {run, frames} = this.model, {settings} = run, requests = this.model.requests.filter((life) => !life.outside);
    document.title = byId("title").textContent = run.scenario || run.checkpoint || say("title");
    const about = say("about", {steps: say("steps", {n: frames.length - 1}), requests: say("requests", {n: requests.length}),
      pages: say("pages", {n: run.num_pages}), size: run.page_size, budget: settings.budget_tokens});
    const terms = [settings.policy, settings.batching, settings.preemption, settings.prefix_sharing && "sharing",
      settings.use_cache === false && "noCache"].filter(Boolean);
    byId("about").replaceChildren(about, ...terms.flatMap((key) =>
      [" · ", term(key, ["sharing", "noCache"].includes(key) ? say(key) : key)]), ` · ${run.backend}`);
    byId("lead").textContent = this.lead();
    byId("find").placeholder = say("find");
    const longest = largest(requests.map((life) => life.id.length));
    document.documentElement.style.setProperty("--ids", `${Math.min(12, longest) + 1}ch`);
    document.querySelectorAll("[data-word]").forEach((node) => { node.textContent = say(node.dataset.word); });
    document.querySelectorAll("[data-label]").forEach((node) => setLabel(node, say(node.dataset.label)));
    this.drawLegends();
  }

  // What the run shows, in a sentence.
  lead() {
    const waits = this.stories.waits.filter((wait) => wait.kind === "wait");
    const waited = new Set(waits.map((wait) => wait.request)).size;
    const longest = say("steps", {n: largest(waits.map((wait) => wait.to - wait.from + 1))});
    const preempted = new Set(this.model.frames.flatMap((frame) => frame.preempted || [])).size;
    return say("lead", {waits: waited ? say("leadWaits", {n: waited, longest}) : say("leadNoWait"),
      preempts: preempted ? say("leadPreempts", {n: preempted}) : say("leadNoPreempt")});
  }

  // The address says where we are: report.html#step=13&request=short&lang=zh&theme=dark. Returns the frame.
  readAddress() {
    const place = new URLSearchParams(location.hash.slice(1)), {requests, frames, run} = this.model;
    setLanguage(place.get("lang") || (navigator.language.startsWith("zh") ? "zh" : "en"));
    if (["light", "dark"].includes(place.get("theme"))) theme.asked = place.get("theme");
    const request = requests.findIndex((life) => life.id === place.get("request"));
    const page = Number(place.get("page") ?? -1);
    if (request >= 0) {
      this.followedRequest = request;
    } else if (Number.isInteger(page) && page >= 0 && page < run.num_pages) {
      this.followedPage = page;
      this.pageStory = this.stories.ofPage(page);
    }
    const frame = frames.findIndex((each) => String(each.step) === place.get("step"));
    return frame >= 0 ? frame : this.opening();
  }

  // A run is opened where something happens: at the first sharing, else the first wait.
  opening() {
    const {notable} = this.stories;
    const entry = notable.find((each) => each.kind === "finds" && each.others.length)
      || notable.find((each) => each.kind === "wait");
    return entry ? entry.from : 0;
  }

  writeAddress() {
    clearTimeout(this.addressTimer); // browsers limit the changes a second
    if (this.playing) return;
    this.addressTimer = setTimeout(() => {
      const place = new URLSearchParams({step: this.now.step});
      if (this.followedRequest !== null) place.set("request", this.model.requests[this.followedRequest].id);
      if (this.followedPage !== null) place.set("page", this.followedPage);
      if (language === "zh") place.set("lang", language);
      if (theme.asked) place.set("theme", theme.asked);
      history.replaceState(null, "", `#${place}`);
    }, 250);
  }
}

window.report = new App(JSON.parse(byId("model").textContent));
