"use strict";
(() => {
  const { figures, palette, margin, num_runs } = JSON.parse(document.getElementById("payload").textContent);
  const darkness = window.matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const NARROW = 460;

  const inkOf = (run) => palette[run % palette.length];
  const lineColour = (run) => (darkness.matches ? inkOf(run).line_dark : inkOf(run).line);
  const textColour = (run) => (darkness.matches ? inkOf(run).text_dark : inkOf(run).text);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // The colour over the page's at this strength, as an opaque colour, so that text on it keeps its contrast.
  function mixed(ink, strength) {
    const channels = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    const page = channels(colour("--page"));
    return `rgb(${channels(ink).map((c, i) => Math.round(strength * c + (1 - strength) * page[i])).join(",")})`;
  }
  const mapColours = () => [[0, mixed(lineColour(0), 0.6)], [0.5, mixed(lineColour(0), 0)], [1, mixed(lineColour(1), 0.6)]];

  // No share has the page's own colour, which stands for an empty cell.
  const shareColours = () => [[0, mixed(lineColour(1), 0.85)], [0.5, mixed(lineColour(6), 0.3)], [1, mixed(lineColour(0), 0.7)]];

  // Columns of cells are one unit apart: a cell is as large as it can be without covering another.
  function cellSize(figure, width) {
    const [left, right] = figure.layout.xaxis.range;
    return Math.min(17, Math.floor(width / (right - left)) - 1);
  }

  function painted(trace, figure, width) {
    // A page whose runs share colours names the ink of each.
    const { run, role, ink = run } = trace.meta;
    const out = { ...trace, visible: !hidden.has(run), showlegend: false };
    if (role === "map") return { ...out, colorscale: mapColours(), textfont: { size: 11, color: colour("--text") } };
    if (role === "share") return { ...out, colorscale: shareColours(), textfont: { size: 11, color: colour("--text") } };
    if (role === "band") return { ...out, fillcolor: `${lineColour(ink)}26`, line: { width: 0 } };
    if (role === "light-bar") out.marker = { color: mixed(lineColour(ink), 0.4) };
    else if (role === "collapse") out.marker = { symbol: "x", size: 13, color: lineColour(ink), line: { width: 2, color: colour("--page") } };
    else if (role === "mark") out.marker = { color: colour("--text"), size: 7, symbol: "line-ew-open", line: { width: 2 } };
    else if (role === "end") out.marker = { size: 11, color: lineColour(ink) };
    else if (role === "open") out.marker = { symbol: `${trace.marker?.symbol ?? "circle"}-open`, size: 9, color: lineColour(ink), line: { width: 2 } };
    else if (role === "cloud") out.marker = { color: lineColour(ink), size: 3.5, opacity: 0.55 };
    else if (role === "cells") {
      const size = cellSize(figure, width);
      out.marker = { ...trace.marker, color: lineColour(ink), size };
      out.textfont = { size: size < 15 ? 9 : 10.5, color: colour("--text") };
    } else if (role === "frames") {
      out.marker = { ...trace.marker, color: colour("--text"), size: cellSize(figure, width), line: { width: 1.5 } };
    } else if (role === "bar") out.marker = { color: lineColour(ink) };
    else {
      out.line = { ...trace.line, color: lineColour(ink), width: trace.line?.width ?? (role === "raw" ? 1 : 2) };
      out.marker = { ...trace.marker, color: lineColour(ink), size: trace.meta.small ? 3.5 : 6 };
    }
    return out;
  }

  function axis(own) {
    return {
      gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: false, fixedrange: false,
      exponentformat: "e",
      tickfont: { size: 11.5 }, ...own, title: { font: { size: 12 }, standoff: 6, ...(own?.title ?? {}) },
    };
  }

  function layoutOf(figure, width) {
    const labels = (figure.layout.annotations ?? []).map((label) => {
      const [run, where] = label.name.slice("run-".length).split(" ");
      const fits = (where === "narrow") === width < NARROW;
      return { ...label, fits, visible: fits && !hidden.has(Number(run)), font: { size: 12, ...label.font, color: textColour(Number(run)) } };
    });
    // Names at the ends of the lines need room; most figures have none on a phone, where the legend names the runs.
    // plotly measures text only after drawing: 0.55 of the font size per character is an estimate.
    const right = Math.max(margin.r, ...labels.filter((label) => label.fits).map((label) => 14 + 0.55 * label.font.size * label.text.length));
    return {
      ...figure.layout,
      margin: { ...margin, r: right, ...figure.layout.margin },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--quiet") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      shapes: (figure.layout.shapes ?? []).map((shape) => ({ ...shape, line: { color: colour("--quiet"), width: 1 } })),
      annotations: labels,
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { size: 12, color: colour("--text") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--text") },
      // An unchanged uirevision keeps the reader's zoom across redraws; another slice starts anew.
      dragmode: "zoom", uirevision: figure.slice ?? "kept", showlegend: false,
    };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: true,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  // A page with selects shows one slice of its figures and rows at a time; other pages show everything.
  const selects = [...document.querySelectorAll("select.slice")];
  const isShown = (slice) => slice === undefined || slice === selects.map((select) => select.value).join("/");
  const buttons = [...document.querySelectorAll(".run")];

  function draw() {
    const shown = new Map(figures.filter((figure) => isShown(figure.slice)).map((figure) => [figure.id, figure]));
    for (const div of document.querySelectorAll(".plot")) {
      const figure = shown.get(div.id);
      div.closest("figure").hidden = figure === undefined;
      if (figure) Plotly.react(div, figure.data.map((trace) => painted(trace, figure, div.clientWidth)), layoutOf(figure, div.clientWidth), config);
    }
    document.documentElement.dataset.drawn = String(shown.size);
  }

  function choose() {
    const rows = [...document.querySelectorAll("tr[data-slice]")];
    for (const row of rows) row.hidden = !isShown(row.dataset.slice);
    if (selects.length) {
      const present = new Set(rows.filter((row) => !row.hidden).map((row) => row.dataset.run));
      for (const button of buttons) button.hidden = !present.has(button.dataset.run);
    }
    draw();
  }

  function legend() {
    const show = () => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(!hidden.has(Number(button.dataset.run))));
      draw();
    };
    for (const button of buttons) {
      const run = Number(button.dataset.run);
      button.addEventListener("click", () => { hidden.has(run) ? hidden.delete(run) : hidden.add(run); show(); });
      button.addEventListener("dblclick", () => {
        const isAlone = hidden.size === num_runs - 1 && !hidden.has(run);
        hidden.clear();
        if (!isAlone) for (let other = 0; other < num_runs; other++) if (other !== run) hidden.add(other);
        show();
      });
    }
  }

  // A finger does not hover: a token's numbers also stand under its response.
  function pick(event) {
    const token = event.target.closest("span[title]");
    if (!token) return;
    const said = event.currentTarget.nextElementSibling;
    said.textContent = token.title;
    said.hidden = false;
  }

  let wide = document.documentElement.clientWidth;
  // A phone's address bar changes the height alone: only a new width redraws.
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === wide) return;
    wide = document.documentElement.clientWidth;
    requestAnimationFrame(draw);
  });
  darkness.addEventListener("change", draw);
  for (const select of selects) select.addEventListener("change", choose);
  for (const line of document.querySelectorAll(".heat")) line.addEventListener("click", pick);
  legend();
  choose();
})();
