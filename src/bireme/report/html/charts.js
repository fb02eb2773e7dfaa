// Plotly's charts. It reads its strings as HTML-like text: `plain` makes of any text only text.

const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
const CONFIG = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] };

function wrapped(text, width = 60) {
  const lines = [""];
  for (const word of String(text).split(/\s+/)) {
    if ((lines[lines.length - 1] + " " + word).length > width) lines.push("");
    lines[lines.length - 1] += (lines[lines.length - 1] ? " " : "") + word.slice(0, 200);
  }
  return lines.map(plain).join("<br>");
}

function axis(title, more = {}) {
  const line = colour("line");
  return {
    title: { text: title, font: { size: 12, color: colour("ink-2") }, standoff: 10 }, gridcolor: line, linecolor: line,
    zeroline: false, automargin: true, tickfont: { size: 11, color: colour("ink-2") }, ...more,
  };
}

function layout(height, more = {}) {
  const narrow = innerWidth < 720;
  return {
    height, margin: { l: narrow ? 46 : 62, r: 12, t: 12, b: 40 }, paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)", font: { family: colour("sans"), size: 12, color: colour("ink") },
    hoverlabel: { bgcolor: colour("ink"), bordercolor: colour("ink"), font: { color: colour("paper"), size: 12 }, align: "left" },
    legend: { orientation: "h", y: 1.0, yanchor: "bottom", x: 0, font: { size: 12 } }, uirevision: "keep",
    // Paper is not resized to: what is printed has the width of a page.
    ...(paper.matches ? { width: 680, autosize: false } : { autosize: true, width: undefined }), ...more,
  };
}

function chart(id, draw) {
  if (!byId(id)) return;
  const drawn = () => { const { traces, layout } = draw(); Plotly.react(id, traces, layout, CONFIG); };
  redraws.push(drawn);
  drawn();
}

// A line of values, or the median of each bucket with its p10 to p90 as a band.
function lineOf(series, name, unit, digits, more = {}, stroke = colour("accent"), group = name) {
  const bucket = series.size > 1 ? `${series.size} steps around ` : "step ";
  const shared = { x: series.x, mode: "lines", legendgroup: group, ...more };
  const line = { ...shared, type: "scatter", y: series.y, name: plain(name), line: { color: stroke, width: 1.6 }, hoverlabel: { namelength: -1 },
    hovertemplate: `${bucket}%{x}<br>%{y:,.${digits}f} ${unit}<extra>${plain(name)}</extra>`, connectgaps: false };
  if (!series.low) return [line];
  const edge = { ...shared, type: "scatter", line: { width: 0 }, hoverinfo: "skip", showlegend: false };
  return [{ ...edge, y: series.low }, { ...edge, y: series.high, fill: "tonexty", fillcolor: stroke + "38" }, line];
}

// --- the heat map ---

function blended(from, to, share) {
  const read = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  const [a, b] = [read(from), read(to)];
  return `rgb(${a.map((value, i) => Math.round(value + share * (b[i] - value))).join(",")})`;
}

function heatPlot() {
  const quantity = data.heat.quantities[byId("quantity").selectedIndex];
  const rows = quantity.rows, columns = data.heat.columns;
  const tint = quantity.state ? colour(quantity.state) : colour("accent");
  const [low, high] = [colour("heat-0"), colour("heat-1")];
  const scale = [[0, low], [0.35, blended(low, tint, 0.55)], [0.75, tint], [1, blended(tint, high, 0.45)]];
  const every = (count, most) => Math.max(1, Math.ceil(count / most));
  const ticks = (labels, most) => labels.map((_, i) => i).filter((i) => i % every(labels.length, most) === 0);
  const narrow = innerWidth < 720;
  const rowTicks = ticks(rows, 32), columnTicks = ticks(columns, narrow ? 5 : 10);
  const short = (text) => (narrow && text.length > 14 ? text.slice(0, 13) + "…" : text.length > 34 ? text.slice(0, 33) + "…" : text);
  byId("heat-note").textContent = quantity.clipped
    ? `${quantity.clipped} cells are above the end of the colours; the largest is ${ms(quantity.largest_ms)} ms.` : "";
  const texts = rows.map((label) => columns.map((column) => `${plain(label)}<br>step ${plain(column)}`));
  return {
    traces: [{
      type: "heatmap", z: quantity.z, text: texts, hoverongaps: false, zmin: quantity.from_ms, zmax: quantity.to_ms,
      hovertemplate: "%{text}<br>%{z:,.2f} ms<extra></extra>", colorscale: scale, xgap: columns.length <= 80 ? 1 : 0, ygap: 1,
      colorbar: { thickness: 10, len: 1, outlinewidth: 0, ticksuffix: narrow ? "" : " ms", tickfont: { size: 11, color: colour("ink-2") }, x: 1.01, xpad: 4 },
    }],
    layout: layout(Math.max(190, Math.min(760, 92 + rows.length * (rows.length <= 8 ? 26 : 14))), {
      xaxis: axis("step", { showgrid: false, tickvals: columnTicks, ticktext: columnTicks.map((i) => plain(columns[i])) }),
      yaxis: axis("", { showgrid: false, autorange: "reversed", tickvals: rowTicks, ticktext: rowTicks.map((i) => plain(short(rows[i]))) }),
    }),
  };
}

// --- step by step ---

// Events have no colour of a state: shapes and places tell them apart.
const LANE_COLOURS = { injection: "ink", verdict: "accent", resumed: "ink", checkpoint: "ink-2", evaluation: "ink-2", "GC pause": "ink-2" };
const LANE_MARKS = { injection: "square", verdict: "diamond", resumed: "star", checkpoint: "triangle-down", evaluation: "circle", "GC pause": "x" };

function laneTraces(lanes) {
  return lanes.flatMap((lane) => {
    const stroke = colour(LANE_COLOURS[lane.name]), name = plain(lane.name);
    const shared = { type: "scatter", name, legendgroup: name, yaxis: "y3", hoverlabel: { namelength: -1 }, hovertemplate: "%{text}<extra></extra>" };
    const middle = [], x = [], text = [];
    for (const [from, to, said] of lane.spans) {
      const label = `steps ${from} to ${to}<br>${wrapped(said)}`;
      x.push(from, (from + to) / 2, to, null);
      text.push(label, label, label, "");
      middle.push(name, name, name, null);
    }
    const traces = [];
    if (x.length) traces.push({ ...shared, x, y: middle, text, mode: "lines+markers", line: { color: stroke, width: 7 }, marker: { size: 1, color: stroke }, showlegend: !lane.marks.length });
    if (lane.marks.length) traces.push({
      ...shared, x: lane.marks.map((mark) => mark[0]), y: lane.marks.map(() => name), mode: "markers",
      text: lane.marks.map(([step, said]) => `step ${step}<br>${wrapped(said)}`),
      marker: { color: stroke, size: 8, symbol: LANE_MARKS[lane.name], line: { width: 1, color: colour("paper") } },
    });
    return traces;
  });
}

function timePlot() {
  const time = data.time, lanes = time.lanes;
  const laneHeight = 20 * lanes.length, plotHeight = time.tokens_per_s ? 330 : 190, gap = 26;
  const whole = laneHeight + (lanes.length ? gap : 0) + plotHeight, top = 1 - (laneHeight + (lanes.length ? gap : 0)) / whole;
  const half = time.tokens_per_s ? top * 0.54 : 0;
  const skipped = time.skipped.x.length ? ["step_ms", "tokens_per_s"].filter((name) => time[name]).map((name, i) => ({
    type: "scatter", mode: "markers", x: time.skipped.x, y: time.skipped[name], name: "skipped step", legendgroup: "skipped", showlegend: i === 0,
    text: time.skipped.text.map(plain), yaxis: i ? "y2" : "y", marker: { symbol: "circle-open", size: 6, color: colour("ink-2") },
    hovertemplate: `step %{x}, %{text}<br>%{y:,.1f} ${i ? "tokens/s (global)" : "ms"}<extra>skipped</extra>` })) : [];
  const traces = [
    ...lineOf(time.step_ms, "step time", "ms", 2),
    ...(time.tokens_per_s ? lineOf(time.tokens_per_s, "tokens/s (global)", "tokens/s (global)", 0, { yaxis: "y2" }, colour("ink-2")) : []),
    ...skipped, ...laneTraces(lanes),
  ];
  const more = {
    xaxis: axis("step", { anchor: time.tokens_per_s ? "y2" : "y", showgrid: false, range: [time.first - 0.5, time.last + 0.5] }),
    yaxis: axis("step (ms)", { domain: [half ? half + 0.045 : 0, top], rangemode: "tozero" }),
    ...(time.tokens_per_s ? { yaxis2: axis("tokens/s (global)", { domain: [0, half - 0.02], rangemode: "tozero" }) } : {}),
    ...(lanes.length ? { yaxis3: axis("", { domain: [top + gap / whole, 1], type: "category", categoryarray: lanes.map((lane) => plain(lane.name)).reverse(),
      categoryorder: "array", range: [-0.6, lanes.length - 0.4], showgrid: false, fixedrange: true }) } : {}),
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
  };
  return { traces, layout: layout(whole + 120, { ...more, margin: { l: 62, r: 12, t: 70, b: 44 } }) };
}

function lossPlot() {
  const loss = data.loss;
  const traces = lineOf(loss.training, "training loss", "", 4, { showlegend: true });
  if (loss.evaluation.x.length) traces.push({ type: "scatter", mode: "lines+markers", ...loss.evaluation, name: "evaluation loss",
    line: { color: colour("ink-2"), width: 1.4 }, marker: { size: 6 }, hovertemplate: "step %{x}<br>%{y:.4f}<extra>evaluation loss</extra>" });
  if (loss.not_numbers.length) {
    const low = Math.min(...loss.training.y.filter((y) => y !== null));
    traces.push({ type: "scatter", mode: "markers", x: loss.not_numbers.map((each) => each[0]), y: loss.not_numbers.map(() => (Number.isFinite(low) ? low : 0)),
      text: loss.not_numbers.map((each) => plain(each[1])), name: "not a number", marker: { symbol: "x", size: 8, color: colour("ink") },
      hovertemplate: "step %{x}: %{text}<extra>not a number</extra>" });
  }
  return { traces, layout: layout(300, { xaxis: axis("step", { showgrid: false }), yaxis: axis("loss"), margin: { l: 62, r: 12, t: 34, b: 44 } }) };
}

if (data.kind === "run") {
  const select = byId("quantity"), groups = new Map();
  for (const quantity of data.heat.quantities) {
    const name = quantity.name.includes("/") ? quantity.name.split("/")[0] : "whole step";
    if (!groups.has(name)) groups.set(name, Object.assign(element("optgroup"), { label: name }));
    groups.get(name).append(element("option", "", quantity.label));
  }
  select.append(...groups.values());
  chart("heat-plot", heatPlot);
  select.addEventListener("change", () => { const { traces, layout } = heatPlot(); Plotly.react("heat-plot", traces, layout, CONFIG); });
  chart("time-plot", timePlot);
  chart("loss-plot", lossPlot);
}

function overlay(title, curves, unit, digits) {
  const traces = curves.flatMap(([name, series, stroke], i) => (series ? lineOf(series, name, unit, digits, { showlegend: true }, stroke, "AB"[i]) : []));
  return { traces, layout: layout(300, { xaxis: axis("step", { showgrid: false }), yaxis: axis(title), margin: { l: 62, r: 12, t: 34, b: 44 } }) };
}

function sweepPlot() {
  const { x, lines, rank, phase } = data.sweep;
  const ends = [Math.min(...x), Math.max(...x)];
  const traces = lines.flatMap((line) => {
    const stroke = colour(line.state), name = plain(line.name);
    const dots = { type: "scatter", mode: "markers", x, y: line.y, name, legendgroup: name, marker: { color: stroke, size: 9 },
      hovertemplate: `delay %{x} ms<br>%{y:,.1f} ms<extra>${name}</extra>` };
    if (!line.fit) return [dots];
    return [dots, { type: "scatter", mode: "lines", x: ends, y: ends.map((each) => line.fit[0] * each + line.fit[1]), legendgroup: name,
      showlegend: false, hoverinfo: "skip", line: { color: stroke, width: 1.6 } }];
  });
  traces.push({ type: "scatter", mode: "lines", x: ends, y: ends, name: "planted", line: { color: colour("ink-2"), dash: "dash", width: 1.2 }, hoverinfo: "skip" });
  const title = `delay planted in ${plain(phase)} of rank ${plain(rank)} (ms)`;
  return { traces, layout: layout(380, { xaxis: axis(title), yaxis: axis("a step (ms)", { rangemode: "tozero" }), margin: { l: 62, r: 12, t: 34, b: 48 } }) };
}

if (data.kind === "compare") {
  const curves = (name) => data.sides.map((side, i) => [`${"AB"[i]}: ${side.name}`, side[name], colour(i ? "accent" : "ink-2")]);
  chart("time-plot", () => overlay("step (ms)", curves("step_ms"), "ms", 2));
  chart("loss-plot", () => overlay("loss", curves("loss"), "", 4));
}

if (data.kind === "study" && data.sweep) chart("sweep-plot", sweepPlot);
