"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const find = (query) => document.querySelector(query);
  const state = {};

  // The address names the place, so that a link leads to it: #objective/remedy/engine/N, or with /seed.
  function read(address) {
    let words;
    try { words = decodeURIComponent(address); } catch { return false; }
    const [preset, remedy, gap, n, seed] = words.split("/");
    const id = [preset, remedy, gap, n].join("/");
    if (!(id in data.places || id in data.same)) return false;
    Object.assign(state, { preset, remedy, gap, n: Number(n), seed: seed === undefined ? null : Number(seed) });
    return true;
  }
  const idOf = (own) => [own.preset, own.remedy, own.gap, own.n].join("/");
  // The typical run unless the reader has chosen one: runs are in the order of their accuracy.
  const chosenOf = (place) => place.runs.find((run) => run.seed === state.seed) ?? place.runs[place.runs.length >> 1];
  const placeOf = (own) => data.places[data.same[idOf(own)] ?? idOf(own)];

  function go(change) {
    Object.assign(state, { seed: null }, change);
    // Another objective or remedy may lack this cell: the first one that it has, then.
    if (!placeOf(state)) {
      const head = `${state.preset}/${state.remedy}/`;
      const known = Object.keys(data.places).find((id) => id.startsWith(head)) ?? Object.keys(data.places).find((id) => id.startsWith(`${state.preset}/`));
      read(known);
    }
    history.replaceState(null, "", `#${idOf(state)}${state.seed === null ? "" : `/${state.seed}`}`);
    draw();
  }

  function made(tag, words = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(words)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }
  function button(children, isPressed, press, words = {}) {
    const element = made("button", { type: "button", "aria-pressed": isPressed, ...words }, ...children);
    element.addEventListener("click", press);
    return element;
  }

  function drawChoices() {
    find("#preset").replaceChildren(...Object.entries(data.presets).map(([name, words]) => made("option", { value: name }, words)));
    find("#preset").value = state.preset;
    const has = (remedy) => Object.keys(data.places).some((id) => id.startsWith(`${state.preset}/${remedy}/`));
    const remedies = Object.entries(data.remedies).filter(([name]) => has(name));
    find("#remedies").replaceChildren(
      ...remedies.map(([name, words]) => button([words], name === state.remedy, () => go({ remedy: name }))),
    );
  }

  function cell(gap, n) {
    const own = { ...state, gap, n };
    const place = placeOf(own);
    if (!place) return made("td", { class: "none" }, "·");
    const isChosen = gap === state.gap && n === state.n;
    const label = `${data.gaps[gap][0]}, N = ${n}: accuracy ${place.area}, ${place.fell} of ${place.n} runs collapsed`;
    const found = button(
      [place.area, made("small", {}, `${place.fell}/${place.n}`)], isChosen, () => go({ gap, n }), { "aria-label": label, title: label },
    );
    found.style.background = place.fill;
    found.style.color = place.light ? "#fff" : "#000";
    if (idOf(own) in data.same) found.className = "twin";
    return made("td", {}, found);
  }

  function drawMap() {
    const heads = data.degrees.map((n) => made("th", { scope: "col" }, `N = ${n}`));
    find("#places thead").replaceChildren(made("tr", {}, made("th", { scope: "col" }, "engine"), ...heads));
    const rows = Object.entries(data.gaps).map(([gap, [words, kl]]) => {
      const cells = data.degrees.map((n) => cell(gap, n));
      if (cells.every((one) => one.className === "none")) return null;
      return made("tr", {}, made("th", { scope: "row" }, words, made("small", {}, `KL ${kl}`)), ...cells);
    });
    find("#places tbody").replaceChildren(...rows.filter((row) => row !== null));
  }

  const WIDTH = 720, LEFT = 52, BOTTOM = 26;
  const across = (update) => LEFT + (update / data.updates) * (WIDTH - LEFT - 8);

  function drawn(tag, words, text) {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(words)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    return element;
  }

  function chart(svg, name, place, bare, scale) {
    const up = (value) => (scale.height - BOTTOM) * (1 - scale.of(value)) + 6;
    const path = (run) => run[name].map(([x, y], i) => `${i ? "L" : "M"}${across(x).toFixed(1)} ${up(y).toFixed(1)}`).join("");
    const height = scale.height + 8;
    const parts = [];
    for (const tick of scale.ticks) {
      parts.push(drawn("path", { class: "grid", d: `M${LEFT} ${up(tick)}H${WIDTH - 8}` }));
      parts.push(drawn("text", { x: LEFT - 8, y: up(tick) + 4, "text-anchor": "end" }, scale.word(tick)));
    }
    for (const update of [0, 100, 200, 300, 400].filter((one) => one <= data.updates)) {
      parts.push(drawn("text", { x: across(update), y: height - 4, "text-anchor": "middle" }, update));
    }
    if (bare !== place) for (const run of bare?.runs ?? []) parts.push(drawn("path", { class: "bare", d: path(run) }));
    const chosen = chosenOf(place);
    // The chosen run last, on a band of the page's colour: one line among a hundred of its colour would not be found.
    for (const run of [...place.runs.filter((one) => one !== chosen), chosen]) {
      if (run === chosen) parts.push(drawn("path", { class: "halo", d: path(run) }));
      const kind = `${run.fell === null ? "stands" : "falls"}${run === chosen ? " chosen" : ""}`;
      parts.push(drawn("path", { class: kind, d: path(run) }));
      const fallen = name === "accuracy" && run.fell !== null ? run[name].find(([x]) => x >= run.fell) : undefined;
      if (fallen) {
        const [x, y] = [across(fallen[0]), up(fallen[1])];
        parts.push(drawn("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8M${x - 4} ${y + 4}l8 -8` }));
      }
    }
    // On top of all, wider than the lines, so that a finger finds them.
    for (const run of place.runs) {
      const hit = drawn("path", { class: "hit", d: path(run) });
      hit.append(drawn("title", {}, `seed ${run.seed}${run.fell === null ? "" : `, collapsed from update ${run.fell} on`}`));
      hit.addEventListener("click", () => go({ seed: run.seed }));
      parts.push(hit);
    }
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
    svg.replaceChildren(...parts);
  }

  const ACCURACY = { height: 250, of: (value) => Math.min(1, value / 0.6), ticks: [0, 0.2, 0.4, 0.6], word: (tick) => tick.toFixed(1) };
  const LOW = -3, HIGH = 1;
  const LOG = {
    height: 150,
    of: (value) => (Math.min(HIGH, Math.max(LOW, Math.log10(Math.max(value, 1e-9)))) - LOW) / (HIGH - LOW),
    ticks: [1e-3, 1e-1, 10], word: (tick) => String(tick),
  };

  function counted(place) {
    return `${place.fell} of ${place.n} runs collapsed; mean accuracy ${place.mean}`;
  }

  function drawRuns() {
    const place = placeOf(state), bare = placeOf({ ...state, remedy: "none" });
    const [engine, kl] = data.gaps[state.gap];
    const twin = data.same[idOf(state)];
    const head = `${data.presets[state.preset]}, ${data.remedies[state.remedy]}, engine: ${engine} (KL ${kl}), N = ${state.n}: `;
    const equal = twin ? ` By construction this is ${data.remedies[twin.split("/")[1]]}, whose runs are shown.` : "";
    find(".key .others").hidden = bare === undefined || bare === place;
    const other = bare && bare !== place ? ` With no remedy: ${counted(bare)}.` : "";
    find("#runs .said").replaceChildren(made("b", {}, head), `${counted(place)}.${equal}${other}`);
    chart(find("#accuracy"), "accuracy", place, bare, ACCURACY);
    chart(find("#kl"), "kl", place, bare, LOG);
    const chosen = chosenOf(place);
    find("#runs .seed").textContent = chosen.seed;
    find("#command").textContent = place.command.replaceAll("{seed}", chosen.seed).replaceAll(" --", " \\\n  --");
  }

  function draw() {
    // Buttons are made anew; with the keyboard the reader stays at the one that is chosen now.
    const held = document.activeElement.closest("#remedies, #places tbody");
    drawChoices();
    drawMap();
    drawRuns();
    held?.querySelector('[aria-pressed="true"]')?.focus({ preventScroll: true });
    document.documentElement.dataset.drawn = idOf(state);
  }

  find("#preset").addEventListener("change", (event) => go({ preset: event.target.value }));
  find("#copy").addEventListener("click", () => navigator.clipboard?.writeText(find("#command").textContent));
  window.addEventListener("hashchange", () => read(location.hash.slice(1)) && draw());
  if (!read(location.hash.slice(1))) read(data.first);
  draw();
})();
