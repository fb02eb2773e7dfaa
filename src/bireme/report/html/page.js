"use strict";
// What every page has: numbers, words, the tip, the theme, bars of a ledger. Texts are set with textContent only.

const data = JSON.parse(document.getElementById("numbers").textContent);
const byId = (id) => document.getElementById(id);
const STATES = data.states, PHASES = data.phases;

function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== "") made.textContent = text;
  return made;
}

// --- numbers in words ---

function ms(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "n/a";
  const size = Math.abs(value);
  return value.toFixed(size < 10 ? 2 : size < 1000 ? 1 : 0);
}

function percent(share) {
  if (share === null || !Number.isFinite(share)) return "n/a";
  return (100 * share).toFixed(share >= 0.1 || share === 0 ? 0 : 1) + " %";
}

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

// --- the tip ---

const tip = byId("tip");

function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = (y + 20 + box.height > innerHeight ? y - box.height - 12 : y + 18) + "px";
}

function withTip(target, text) {
  target.addEventListener("pointermove", (event) => showTip(text, event.clientX, event.clientY));
  target.addEventListener("pointerleave", () => { tip.hidden = true; });
}

addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });

// --- the theme ---

const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
const paper = matchMedia("print");
const redraws = []; // of what has its colours from the style sheet, and does not follow it by itself
const redraw = () => redraws.forEach((draw) => draw());
const isDark = () => (document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function nameTheme() {
  byId("theme").textContent = isDark() ? "Light" : "Dark";
}

byId("theme").addEventListener("click", () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameTheme();
  redraw();
});
systemIsDark.addEventListener("change", () => { nameTheme(); redraw(); });
paper.addEventListener("change", redraw);
nameTheme();

// --- bars of a ledger ---

const hiddenStates = new Set();
let which = "typical";

// One part a state, with what is in it by phase for the tip. `cells`: phase by phase, in each the states.
function parts(cells) {
  const total = sum(cells);
  return STATES.map((state, s) => {
    const ofPhase = PHASES.map((phase, p) => [phase, cells[p * STATES.length + s]]);
    const value = sum(ofPhase.map((each) => each[1]));
    const lines = ofPhase.filter((each) => each[1] > 0).map(([phase, part]) => `${phase}: ${ms(part)} ms`);
    const text = [`${state}: ${ms(value)} ms, ${percent(value / total)} of the step`, ...lines].join("\n");
    return { state, value, share: value / total, text };
  });
}

function track(pieces, scale, labelled) {
  const made = element("div", "track");
  for (const piece of pieces) {
    if (!(piece.value > 0)) continue;
    const part = element("div", "part" + (piece.hidden ? " hidden-part" : ""));
    part.dataset.state = piece.state;
    part.style.width = (100 * piece.value) / scale + "%";
    const pixels = (Math.min(innerWidth, 1064) * piece.value) / scale;
    if (labelled && pixels > 52) {
      part.append(element("span", "", ms(piece.value) + (pixels > 90 ? " ms" : "")));
      if (pixels > 90) part.append(element("small", "", piece.state));
    }
    withTip(part, piece.text);
    made.append(part);
  }
  return made;
}

function row(bar, scale, labelled) {
  const made = element("div", "row" + (bar.accused ? " accused" : ""));
  const name = element("div", "name");
  name.append(element("b", "", bar.label), element("small", "", bar.detail));
  name.title = bar.detail ? `${bar.label}, ${bar.detail}` : bar.label;
  const cells = bar[which];
  const shown = cells ? parts(cells).filter((piece) => !hiddenStates.has(piece.state)) : [];
  const total = cells ? sum(cells) : null;
  const bars = track(shown, labelled && total && data.kind === "run" ? total : scale, labelled);
  bars.setAttribute("role", "img");
  const said = shown.map((piece) => `${piece.state} ${ms(piece.value)} ms`).join(", ");
  bars.setAttribute("aria-label", `${bar.label}: ${cells ? said : "n/a"}`);
  made.append(name, bars, element("div", "sum", cells ? ms(total) + " ms" : "n/a"));
  return made;
}

function drawBars(id, bars, labelled = false) {
  byId(id)?.replaceChildren(...bars.map((bar) => row(bar, data.scale_ms || 1, labelled)));
}

function drawLedger(title, cells) {
  byId("ledger-title").textContent = title;
  const total = sum(cells);
  const cell = (value, state, phase) => {
    const made = element("td", value ? "" : "zero", value === null ? "n/a" : value ? ms(value) : "-");
    if (value > 0 && state) {
      made.dataset.state = state;
      made.style.setProperty("--share", Math.min(70, (120 * value) / total).toFixed(1) + "%");
      withTip(made, `${phase} / ${state}: ${ms(value)} ms, ${percent(value / total)} of the step`);
    }
    return made;
  };
  const known = (values) => (values.every((value) => value === null) ? null : sum(values));
  const head = element("thead"), body = element("tbody"), foot = element("tfoot");
  const line = (parent, name, cells) => {
    const made = element("tr"), title = element("th", "", name);
    title.scope = "row";
    made.append(title, ...cells);
    parent.append(made);
  };
  const names = STATES.map((state) => {
    const made = element("th", "", state);
    made.scope = "col";
    made.dataset.state = state;
    return made;
  });
  line(head, "ms", [...names, element("th", "", "sum")]);
  PHASES.forEach((phase, p) => {
    const values = cells.slice(p * STATES.length, (p + 1) * STATES.length);
    if (known(values)) line(body, phase, [...values.map((v, s) => cell(v, STATES[s], phase)), cell(known(values))]);
  });
  const columns = STATES.map((_, s) => known(PHASES.map((_, p) => cells[p * STATES.length + s])));
  line(foot, "step", [...columns.map((value) => cell(value)), cell(total)]);
  byId("ledger").replaceChildren(head, body, foot);
}

function chosenRank() {
  const field = byId("rank"), error = byId("rank-error");
  error.textContent = "";
  if (!field || field.value.trim() === "") return null;
  const rank = Number(field.value);
  if (!Number.isInteger(rank) || !data.ledgers[which][rank]) {
    const last = data.ledgers[which].length - 1;
    const known = Number.isInteger(rank) && rank >= 0 && rank <= last;
    error.textContent = known ? `Rank ${rank} recorded none of these steps.` : `There are ranks 0 to ${last}.`;
    return null;
  }
  return rank;
}

function drawStep() {
  drawBars("overall", [data.bars.overall], true);
  drawBars("nodes", data.bars.nodes);
  drawBars("ranks", data.bars.ranks);
  byId("how-chosen").textContent = `The bars: ${data.how_chosen[which]}.`;
  const rank = chosenRank();
  const kind = which === "typical" ? "typical step" : "mean step";
  if (rank === null) {
    byId("rank-bar").replaceChildren();
    drawLedger(data.ledgers.mean.length > 1 ? `The ledger of all ranks, ${kind}` : `The ledger, ${kind}`,
      data.bars.overall[which]);
  } else {
    const cells = data.ledgers[which][rank], detail = data.rank_names[rank];
    drawBars("rank-bar", [{ label: `rank ${rank}`, detail, [which]: cells }]);
    drawLedger(`The ledger of rank ${rank} on ${detail}, ${kind}`, cells);
  }
}

// Buttons that switch a state off in all bars of the page.
function stateLegend(id, draw, names = STATES) {
  byId(id).replaceChildren(...STATES.map((state, s) => {
    const button = element("button", "", names[s]);
    button.type = "button";
    button.dataset.state = state;
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!hiddenStates.delete(state)) hiddenStates.add(state);
      button.setAttribute("aria-pressed", String(!hiddenStates.has(state)));
      draw();
    });
    return button;
  }));
}

function drawHidden() {
  const all = sum(data.communication.parts.map((part) => part.ms));
  const scale = Math.max(...[false, true].map((hidden) =>
    sum(data.communication.parts.filter((part) => part.hidden === hidden).map((part) => part.ms))), 1e-9);
  byId("hidden").replaceChildren(...[false, true].map((hidden) => {
    const pieces = data.communication.parts.filter((part) => part.hidden === hidden).map((part) => (
      { state: part.state, value: part.ms, hidden, text: `${part.label}: ${ms(part.ms)} ms a step` }));
    const here = sum(pieces.map((piece) => piece.value));
    return plainRow(hidden ? "hidden" : "exposed", percent(all ? here / all : null), pieces, scale, ms(here) + " ms");
  }));
}

// Bars of one number each, with a mark for what it is held against.
function valueBars(id, group) {
  const scale = Math.max(...group.rows.map((each) => Math.max(each.value, each.mark ?? 0)), 1e-9);
  byId(id).replaceChildren(...group.rows.map((each) => plainRow(each.label, "", [
    { state: "accent", value: each.value, text: `${each.label}: ${each.text}` }], scale, each.text, each.mark, group.mark)));
}

function plainRow(label, detail, pieces, scale, total, mark, markText) {
  const made = element("div", "row"), name = element("div", "name");
  name.append(element("b", "", label), element("small", "", detail));
  name.title = label;
  const bars = track(pieces, scale, false);
  bars.setAttribute("role", "img");
  bars.setAttribute("aria-label", pieces.map((piece) => piece.text).join(", "));
  if (mark) {
    const tick = element("i", "tick");
    tick.style.left = `min(${(100 * mark) / scale}%, calc(100% - 3px))`;
    tick.title = markText;
    bars.append(tick);
  }
  made.append(name, bars, element("div", "sum", total));
  return made;
}

function drawStudy() {
  byId("cells-bars").replaceChildren(...data.bars.map((bar) => {
    const pieces = bar.parts.map((value, i) => ({ state: bar.states[i], value, text: `${bar.names[i]}: ${ms(value)} ms` }))
      .filter((piece) => !hiddenStates.has(piece.state));
    const bound = bar.bound_ms === null ? "" : `bound: ${ms(bar.bound_ms)} ms`;
    return plainRow(bar.label, bar.detail, pieces, data.scale_ms || 1, ms(bar.mean_ms) + " ms", bar.bound_ms, bound);
  }));
}

function drawBoth() {
  data.sides.forEach((side, i) => {
    drawBars(`overall-${i}`, [side.bars.overall], true);
    const nodes = side.bars.nodes.length ? side.bars.nodes : [side.bars.overall];
    drawBars(`nodes-${i}`, nodes);
  });
  byId("how-chosen").textContent = data.sides.map((side, i) => `${"AB"[i]}: ${side.how_chosen[which]}.`).join(" ");
}

function chooseStep(draw) {
  for (const choice of document.querySelectorAll('input[name="which"]')) {
    choice.addEventListener("change", () => { which = choice.value; draw(); });
  }
}

if (data.kind === "run") {
  stateLegend("states", drawStep);
  chooseStep(drawStep);
  byId("rank")?.addEventListener("input", drawStep);
  drawStep();
  if (data.communication.parts.length) drawHidden();
}

if (data.kind === "compare") {
  stateLegend("states", drawBoth);
  chooseStep(drawBoth);
  drawBoth();
}

if (data.kind === "study") {
  stateLegend("states", drawStudy, data.bars[0].names);
  drawStudy();
  data.values.filter((group) => group.rows.length).forEach((group, i) => valueBars(`values-bars-${i}`, group));
}
