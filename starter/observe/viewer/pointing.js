// Pointers: dragging on a picture moves the playhead, clicking follows, hovering explains.

function scrubOn(app, panel, frameOf) {
  let dragging = false;
  const move = (event) => {
    const frame = frameOf(panel.place(event)[0], panel);
    if (frame !== null) app.jump(frame);
  };
  panel.box.addEventListener("pointerdown", (event) => {
    dragging = true;
    move(event);
  });
  panel.box.addEventListener("pointermove", (event) => dragging && event.buttons && move(event));
  window.addEventListener("pointerup", () => { dragging = false; });
}

// text(place) is what the tip says there, or null.
function tipOn(panel, text) {
  const tip = byId("tip");
  panel.box.addEventListener("pointermove", (event) => {
    const words = event.pointerType === "touch" ? null : text(panel.place(event));
    tip.hidden = !words;
    if (words) placeTip(words, event.clientX, event.clientY);
  });
  panel.box.addEventListener("pointerleave", () => { tip.hidden = true; });
}

function placeTip(words, x, y) {
  const tip = byId("tip");
  tip.hidden = false;
  tip.textContent = words;
  const below = y + 18, above = y - tip.offsetHeight - 12;
  tip.style.left = `${Math.max(8, Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${below + tip.offsetHeight > window.innerHeight ? above : below}px`;
}

// A word that explains itself when it is pointed at, reached by Tab, or touched.
function term(key, text) {
  const words = HINTS[language][key];
  if (!words) return document.createTextNode(text);
  const node = element("span", {class: "term", tabindex: "0", "data-term": key}, text);
  const show = () => {
    const box = node.getBoundingClientRect();
    placeTip(words, box.left - 14, box.bottom - 12);
  };
  ["pointerenter", "focus", "click"].forEach((kind) => node.addEventListener(kind, show));
  ["pointerleave", "blur"].forEach((kind) => node.addEventListener(kind, () => { byId("tip").hidden = true; }));
  return node;
}

function pointOnGantt(app, panel) {
  const chart = panel.picture, {requests, frames, phases} = app.model;
  const hit = (x, y) => {
    const request = chart.rowAt(y), frame = x < chart.left ? null : chart.frameAt(x);
    if (request === null || y - panel.scroll < chart.axis) return null;
    return {request, frame, phase: frame === null ? -1 : phaseAt(requests[request], frame)};
  };
  scrubOn(app, panel, (x) => (x < chart.left ? null : chart.frameAt(x)));
  panel.box.addEventListener("click", (event) => {
    const what = hit(...panel.place(event));
    if (!what) return;
    if (what.frame === null) app.toggleRequest(what.request); // its name
    else if (what.phase >= 0 && app.followedRequest !== what.request) app.follow(what.request);
  });
  tipOn(panel, (place) => {
    const what = hit(...place);
    if (!what || (what.phase < 0 && what.frame !== null)) return null;
    const name = requests[what.request].id;
    if (what.frame === null) return name;
    const reason = reasonsOf(app.model, frames[what.frame]).get(what.request);
    const first = `${name} · ${app.stepName(what.frame)} · ${say(phases[what.phase])}`;
    return reason ? `${first}\n${reasonText(reason)}` : first;
  });
}

function pointOnPool(app, panel) {
  const {run, requests} = app.model;
  panel.box.addEventListener("click", (event) => {
    const page = panel.picture.pageAt(...panel.place(event));
    if (page !== null) app.togglePage(page);
  });
  tipOn(panel, (place) => {
    const page = panel.picture.pageAt(...place);
    if (page === null) return null;
    const use = app.pages.get(page);
    if (!use) return say("pageTip", {page, state: say(app.state.published.has(page) ? "pageCached" : "free")});
    const state = use.owners.map((request) => requests[request].id).join(", ");
    const counts = `${say("fill", {n: use.filled, size: run.page_size})} · ${say("refs", {n: use.owners.length})}`;
    return `${say("pageTip", {page, state})}\n${counts}`;
  });
}
