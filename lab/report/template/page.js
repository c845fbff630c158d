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

  function painted(trace) {
    const { run, role } = trace.meta;
    const out = { ...trace, visible: !hidden.has(run), showlegend: false };
    if (role === "cloud") out.marker = { color: lineColour(run), size: 3.5, opacity: 0.55 };
    else if (role === "bar") out.marker = { color: lineColour(run) };
    else {
      out.line = { ...trace.line, color: lineColour(run), width: role === "raw" ? 1 : 2 };
      out.marker = { color: lineColour(run), size: 6 };
    }
    return out;
  }

  function axis(own) {
    return {
      gridcolor: colour("--line"), linecolor: colour("--line"), zeroline: false, automargin: false, fixedrange: false,
      tickfont: { size: 11.5 }, ...own, title: { font: { size: 12 }, standoff: 6, ...(own?.title ?? {}) },
    };
  }

  function layoutOf(figure, width) {
    const labels = (figure.layout.annotations ?? []).map((label) => {
      const run = Number(label.name.slice("run-".length));
      const visible = width >= NARROW && !hidden.has(run);
      return { ...label, visible, font: { size: 12, color: textColour(run) } };
    });
    // Names at the ends of the lines need room; a phone has none, there the legend alone tells the runs apart.
    const longest = Math.max(0, ...labels.map((label) => label.text.length));
    const right = labels.length && width >= NARROW ? 14 + 6.6 * longest : margin.r;
    return {
      ...figure.layout,
      margin: { ...margin, r: right },
      font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: colour("--quiet") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis),
      shapes: (figure.layout.shapes ?? []).map((shape) => ({ ...shape, line: { color: colour("--quiet"), width: 1 } })),
      annotations: labels,
      hoverlabel: { bgcolor: colour("--raised"), bordercolor: colour("--line"), font: { size: 12, color: colour("--text") } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: colour("--quiet"), activecolor: colour("--text") },
      dragmode: "zoom", uirevision: "kept", showlegend: false,
    };
  }

  const config = {
    responsive: true, displaylogo: false, displayModeBar: true,
    modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
  };

  function draw() {
    for (const figure of figures) {
      const div = document.getElementById(figure.id);
      Plotly.react(div, figure.data.map(painted), layoutOf(figure, div.clientWidth), config);
    }
  }

  function legend() {
    const buttons = [...document.querySelectorAll(".run")];
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

  let wide = document.documentElement.clientWidth;
  window.addEventListener("resize", () => {
    if (document.documentElement.clientWidth === wide) return;
    wide = document.documentElement.clientWidth;
    requestAnimationFrame(draw);
  });
  darkness.addEventListener("change", draw);
  legend();
  draw();
  document.documentElement.dataset.drawn = String(figures.length);
})();
