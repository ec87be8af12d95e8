// The small charts at the bottom.

// A series over frames: columns of the mean of what falls into them. Lines are drawn over each other.
class SeriesChart {
  constructor(app, series, top) {
    this.app = app;
    this.series = series; // [{values, colour: theme name, area: bool}]
    this.highest = top;
  }

  layout() {
    return 72;
  }

  base(context, panel) {
    const count = this.app.model.frames.length, {width, height} = panel;
    const y = (value) => height - 5 - (value / this.highest) * (height - 10);
    context.fillStyle = theme.line;
    context.fillRect(0, height - 5, width, 1);
    context.fillRect(0, 5, width, 1);
    for (const {values, colour, area} of this.series) {
      const columns = Math.max(1, Math.min(Math.floor(width), count));
      const means = Array.from({length: columns}, (_, i) => mean(values.slice(Math.floor((i * count) / columns),
        Math.max(Math.floor((i * count) / columns) + 1, Math.floor(((i + 1) * count) / columns)))));
      context.beginPath();
      means.forEach((value, i) => {
        context.lineTo((i * width) / columns, y(value));
        context.lineTo(((i + 1) * width) / columns, y(value));
      });
      context.strokeStyle = context.fillStyle = theme[colour];
      context.lineWidth = 1.4;
      context.lineJoin = "round";
      context.stroke();
      if (!area) continue;
      context.lineTo(width, height - 5);
      context.lineTo(0, height - 5);
      context.globalAlpha = 0.14;
      context.fill();
      context.globalAlpha = 1;
    }
  }

  top(context, panel) {
    const column = panel.width / this.app.model.frames.length;
    context.fillStyle = theme.accent;
    context.fillRect(Math.round((this.app.frame + 0.5) * column) - 0.75, 2, 1.5, panel.height - 4);
  }
}

// A stem for each request that has the value, in the order of arrival; the median as a dashed line.
class StemChart {
  constructor(app, key, summary) {
    this.app = app;
    this.summary = summary;
    this.key = key;
    this.stems = app.model.requests.map((life, request) => ({request, life, value: life[key]}))
      .filter((stem) => stem.value !== undefined);
    this.highest = largest(this.stems.map((stem) => stem.value)) || 1;
  }

  layout(width) {
    this.column = width / Math.max(1, this.stems.length);
    return 72;
  }

  stemAt(x) {
    return this.stems[Math.floor(x / this.column)] || null;
  }

  base(context, panel) {
    const y = (value) => panel.height - 5 - (value / this.highest) * (panel.height - 14);
    context.fillStyle = theme.line;
    context.fillRect(0, panel.height - 5, panel.width, 1);
    this.stems.forEach(({request, life, value}, i) => {
      const x = (i + 0.5) * this.column;
      context.globalAlpha = this.app.follows(request) ? 1 : DIM;
      context.fillStyle = hueOf(life);
      context.fillRect(x - 0.75, y(value), 1.5, panel.height - 5 - y(value));
      context.beginPath();
      context.arc(x, y(value), Math.max(1.2, Math.min(4, this.column / 2)), 0, 7);
      context.fill();
    });
    context.globalAlpha = 1;
    if (this.summary.p50 === null) return;
    context.strokeStyle = theme.muted;
    context.setLineDash([3, 3]);
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, Math.round(y(this.summary.p50)) + 0.5);
    context.lineTo(panel.width, Math.round(y(this.summary.p50)) + 0.5);
    context.stroke();
    context.setLineDash([]);
  }
}

// ------------------------------------------------------------------------------------------------------ which

// All charts: [{panel, head}]; head() puts the current numbers over the picture.
function makeCharts(app) {
  const {metrics, frames, run} = app.model, charts = [];
  const steps = (value) => frames.map((frame) => (frame.end ? 0 : value(frame)));
  const add = (word, picture, number, note) => {
    const strong = element("strong"), small = element("span"), box = element("div", {class: "panel"});
    const title = element("h3", {"data-word": word});
    byId("charts").append(element("div", {class: "chart"}, title, element("p", {}, strong, small), box));
    const panel = new Panel(box, picture);
    charts.push({panel, head: () => { strong.textContent = number(); small.textContent = note(); }});
    return panel;
  };
  const series = (word, top, list, number, note) => {
    const panel = add(word, new SeriesChart(app, list, top), number, note);
    scrubOn(app, panel, (x) => Math.floor((x / panel.width) * frames.length));
  };

  series("chartPages", run.num_pages, [{values: steps((frame) => frame.used), colour: "ink", area: true}],
    () => app.pages.size, () => say("peak", {value: `${metrics.kv_peak_pages} / ${run.num_pages}`}));
  const load = steps((frame) => (frame.budget ? Math.min(1, sumOfChunks(frame) / frame.budget) : 0));
  series("chartBatch", 1, [{values: load, colour: "ink", area: true}],
    () => percent(load[app.frame]), () => say("mean", {value: percent(metrics.batch_utilization)}));
  const empty = steps((frame) => (frame.used ? frame.empty / (frame.used * run.page_size) : 0));
  series("chartEmpty", 1, [{values: empty, colour: "ink", area: true}], () => percent(empty[app.frame]),
    () => (metrics.fragmentation_mean === null ? "–" : say("meanSlots", {value: metrics.fragmentation_mean.toFixed(1)})));
  let queue = [];
  const waiting = frames.map((frame) => {
    queue = frame.end ? [] : frame.waiting || queue;
    return frame.waiting_count || queue.length; // a long queue lists its first alone
  });
  const running = steps((frame) => frame.running.length), most = Math.max(1, largest(waiting), largest(running));
  series("chartActive", most, [{values: waiting, colour: "warn", area: true}, {values: running, colour: "ink"}],
    () => `${running[app.frame]}, ${waiting[app.frame]}`, () => say("peak", {value: most}));
  for (const [word, key] of [["chartTtft", "ttft"], ["chartTpot", "tpot"]]) {
    const chart = new StemChart(app, key, metrics[key]);
    const panel = add(word, chart, () => app.time(metrics[key].p50), () => `p90 ${app.time(metrics[key].p90)}`);
    panel.box.addEventListener("click", (event) => {
      const stem = chart.stemAt(panel.place(event)[0]);
      if (stem) app.toggleRequest(stem.request);
    });
    tipOn(panel, ([x]) => {
      const stem = chart.stemAt(x);
      return stem && `${stem.life.id}: ${app.time(stem.value)}`;
    });
  }
  return charts;
}

const sumOfChunks = (frame) => chunksOf(frame).reduce((sum, chunk) => sum + chunk.count, 0);
