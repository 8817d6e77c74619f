// The charts of the overview, redrawn every five seconds with data from the server.
"use strict";

(() => {
  const place = document.getElementById("charts");
  if (!place) return;
  const colours = () => {
    const style = getComputedStyle(document.documentElement);
    const of = (name) => style.getPropertyValue(`--${name}`).trim();
    return { good: of("good"), wait: of("wait"), bad: of("bad"), note: of("note"), accent: of("accent"), soft: of("soft"), line: of("line") };
  };
  const seconds = (value) => {
    if (value == null) return "–";
    if (value < 120) return `${Math.round(value)} s`;
    if (value < 7200) return `${Math.round(value / 60)} min`;
    return `${Number((value / 3600).toFixed(1))} h`;
  };
  // Axis steps: durations in seconds, minutes and hours; counts in whole numbers.
  const counts = Array.from({ length: 24 }, (_, i) => [1, 2, 5][i % 3] * 10 ** Math.floor(i / 3));
  const steps = [1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];
  const millis = (value) => {
    if (value == null) return "–";
    if (value < 1000) return `${Math.round(value)} ms`;
    return value < 10000 ? `${(value / 1000).toFixed(1)} s` : seconds(value / 1000);
  };
  const decade = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-6;
  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
  const spans = { "15 min": 900, "1 h": 3600, "6 h": 21600, "24 h": 86400 };
  const span = spans[place.dataset.window] ?? 3600;
  const high = 205;
  let latest = Date.now() / 1000;
  const plain = (value) => (value == null ? "–" : String(value));
  const bars = uPlot.paths.bars({ size: [0.75, 40] });

  const kinds = {
    outcomes: { bars: true, format: plain, lines: [["succeeded", "good"], ["failed", "bad"], ["retryable", "note"], ["unknown", "wait"]] },
    latency: { format: millis, log: true, lines: [["median", "accent"], ["p95", "note"], ["p99", "bad"]] },
    states: { format: plain, lines: [["unknown", "wait"], ["retryable", "soft"], ["in progress", "note"], ["pending", "accent"], ["dead letters", "bad"]] },
    workers: { format: plain, high: 110, lines: [["alive", "good"]] },
    lag: { format: seconds, lines: [["outbox", "accent"], ["oldest unknown", "wait"]] },
  };
  const drawn = {};
  // Without the mouse, the legend shows the total of bars and the latest value of lines.
  const idle = (kind, column) => (kind.bars ? column.reduce((sum, one) => sum + (one ?? 0), 0) : column.findLast((one) => one != null));

  function stacked(columns) {
    const [x, ...rest] = columns;
    const sums = x.map(() => 0);
    const piled = rest.map((column) => column.map((value, index) => (sums[index] += value ?? 0)));
    return [x, ...piled];
  }

  function draw(name, data) {
    const kind = kinds[name];
    const element = place.querySelector(`[data-chart="${name}"]`);
    const empty = !data[0].length || data.slice(1).every((column) => column.every((value) => value == null || (kind.bars && !value)));
    if (empty) {
      drawn[name]?.destroy();
      delete drawn[name];
      const words = document.createElement("p");
      words.className = "none";
      words.textContent = data[0].length ? "Nothing in this time range." : "No data yet.";
      element.replaceChildren(words);
      return;
    }
    const shown = kind.bars ? stacked(data) : data;
    const order = kind.bars ? [shown[0], ...shown.slice(1).reverse()] : shown;
    if (drawn[name]) { drawn[name].raw = data; drawn[name].setData(order); return; }
    const ink = colours();
    element.replaceChildren();
    const axis = { stroke: ink.soft, grid: { stroke: ink.line, width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const lines = kind.lines.map(([label, colour], index) => ({
      label,
      stroke: ink[colour],
      width: kind.bars ? 0 : 2,
      fill: kind.bars ? ink[colour] : undefined,
      paths: kind.bars ? bars : undefined,
      points: { show: (plot, series) => !kind.bars && plot.data[series].filter((one) => one != null).length < 40, size: 5 },
      spanGaps: true,
      value: (plot, value, series, at) => kind.format(at == null ? idle(kind, (plot.raw ?? data)[index + 1]) : plot.raw[index + 1][at]),
    }));
    const plot = new uPlot({
      width: element.clientWidth,
      height: kind.high ?? high,
      padding: [8, 18, 0, 0],
      cursor: { drag: { x: false, y: false }, points: { show: !kind.bars } },
      legend: { live: true },
      scales: { x: { time: true, range: () => [latest - span, latest] }, y: kind.log ? { distr: 3 } : { range: (_, low, top) => [0, Math.max(top * 1.08, kind.format === plain ? 4 : 1)] } },
      axes: [{ ...axis, size: 28, values: (_, ticks) => ticks.map((tick) => clock.format(new Date(tick * 1000))) }, { ...axis, grid: { ...axis.grid, filter: (_, ticks) => (kind.log ? ticks.map((tick) => (decade(tick) ? tick : null)) : ticks) }, ...(kind.log ? {} : { incrs: kind.format === seconds ? steps : counts }), size: 56, values: (_, ticks) => ticks.map((tick) => (tick == null ? "" : Number.isInteger(tick) || kind.format !== plain ? kind.format(tick) : "")) }],
      series: [{}, ...(kind.bars ? lines.reverse() : lines)],
    }, order, element);
    plot.raw = data;
    drawn[name] = plot;
  }

  async function load() {
    const answer = await fetch(place.dataset.series, { headers: { accept: "application/json" }, redirect: "manual" }).catch(() => null);
    if (!answer) return;
    if (answer.type === "opaqueredirect") location.reload();
    if (!answer.ok) return;
    const data = await answer.json();
    latest = data.now;
    for (const name of Object.keys(kinds)) draw(name, data[name]);
    place.dataset.drawn = "yes";
  }

  function redraw() {
    for (const name of Object.keys(drawn)) { drawn[name].destroy(); delete drawn[name]; }
    load();
  }

  load();
  setInterval(() => { if (!document.hidden) load(); }, 5000);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(() => {
    for (const [name, plot] of Object.entries(drawn)) {
      plot.setSize({ width: plot.root.parentElement.clientWidth, height: kinds[name].high ?? high });
    }
  }).observe(place);
})();
