// The card that tells: what happened in the run, or the story of the request or page that is followed.

const STORY_WINDOW = 60; // of a long story, one to three windows around the current frame are shown

class StoryCard {
  constructor(app) {
    this.app = app;
    this.key = null; // what the list shows
    this.entries = [];
    this.target = null; // the row that is kept in view
  }

  draw() {
    const {followedRequest: request, followedPage: page, model, stories} = this.app;
    byId("unfollow").hidden = request === null && page === null;
    if (request !== null) {
      this.show(say("storyOf", {id: model.requests[request].id}), this.requestFacts(request), stories.of[request]);
    } else if (page !== null) {
      this.show(say("pageStory", {page}), this.pageFacts(page), this.app.pageStory);
    } else {
      this.show(say("story"), [element("dd", {class: "hint"}, say("hint"))], stories.notable);
    }
  }

  show(title, facts, entries) {
    byId("story-title").textContent = title;
    byId("facts").replaceChildren(...facts);
    const kinds = KINDS[byId("kinds").value];
    if (kinds) entries = entries.filter((entry) => kinds.has(entry.kind));
    const first = entries.findIndex((entry) => entry.to >= this.app.frame);
    const low = Math.max(0, Math.floor((first < 0 ? entries.length : first) / STORY_WINDOW) - 1) * STORY_WINDOW;
    const key = [title, low, byId("kinds").value, this.app.themeNumber].join("\0");
    if (key !== this.key) {
      this.key = key;
      this.entries = entries.slice(low, low + 3 * STORY_WINDOW);
      byId("story").replaceChildren(...this.entries.map((entry) => this.row(entry)));
    }
    this.mark();
  }

  // Which entries are now, which still to come; the first of those stays in view.
  mark() {
    const list = byId("story"), {frame} = this.app;
    let target = null;
    this.entries.forEach((entry, i) => {
      const row = list.children[i].firstChild;
      row.classList.toggle("now", entry.from <= frame && frame <= entry.to);
      row.classList.toggle("later", entry.from > frame);
      if (entry.to >= frame) target = target || row;
    });
    target = target || list.lastElementChild;
    if (target && target !== this.target) {
      requestAnimationFrame(() => { list.scrollTop = target.offsetTop - list.offsetTop - list.clientHeight / 3; });
    }
    this.target = target;
  }

  row(entry) {
    const {requests} = this.app.model;
    const life = requests[entry.kind === "page" ? entry.owners[0] : entry.request];
    const quiet = QUIET.has(entry.kind) || (entry.kind === "page" && !life);
    const tone = WARNING.has(entry.kind) ? "warn" : quiet ? "quiet" : "";
    const [from, to] = [entry.from, entry.to].map((frame) => this.app.stepNumber(frame));
    return element("li", {}, element("button", {class: tone, onclick: () => this.app.jump(entry.from)},
      element("span", {class: "when"}, from === to ? from : `${from}–${to}`), life ? dot(life) : element("span"),
      this.sentence(storyText(this.app.model, entry), life)));
  }

  // Sentences begin with whom they are about.
  sentence(text, life) {
    if (!life || !text.startsWith(life.id)) return element("span", {}, text);
    return element("span", {}, idOf(life), text.slice(life.id.length));
  }

  requestFacts(request) {
    const {model, state, stories, frame} = this.app, life = model.requests[request], pages = state.table(request);
    const facts = [];
    const fact = (word, ...content) =>
      facts.push(element("dt", {}, say(word)), element("dd", {"data-fact": word}, ...content));
    const shared = [...stories.shares[request]].map(([other, set]) =>
      say("sharesWith", {pages: pageWords(set), others: model.requests[other].id}));
    if (!life.outside) fact("times", `TTFT ${this.app.time(life.ttft)} · TPOT ${this.app.time(life.tpot)}`);
    fact("pagesNow", pages.length ? pageWords(pages) : state.swapped.has(request) ? say("swapped") : "–");
    fact("shared", shared.length ? shared.join("; ") : say("neverShared"));
    if (life.text) fact("prompt", element("div", {class: "text"}, life.text));
    if (life.output) {
      const spell = (test) => life.output.filter(([when]) => test(when)).map(([, text]) => text).join("");
      fact("output", element("div", {class: "text"}, spell((when) => when < frame),
        element("span", {class: "later"}, spell((when) => when >= frame))));
    }
    return facts;
  }

  pageFacts(page) {
    const {model, state, pages} = this.app, use = pages.get(page), owners = use ? use.owners : [];
    const name = owners.length ? "used" : state.published.has(page) ? "cached" : "free";
    const who = owners.map((request) => model.requests[request])
      .map((life) => element("span", {class: "owner"}, dot(life), " ", idOf(life)));
    const filled = use ? ` · ${say("fill", {n: use.filled, size: model.run.page_size})}` : "";
    const counts = element("div", {}, say("refs", {n: owners.length}) + filled);
    return [element("dt", {}, say(name)), element("dd", {id: "owners"}, ...who, counts)];
  }
}

const WARNING = new Set(["wait", "together", "preempt", "error", "refuse", "fault", "swapsOut"]);
const QUIET = new Set(["takes", "evicts"]);
