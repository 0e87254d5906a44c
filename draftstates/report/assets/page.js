"use strict";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const make = (tag, text, name) => {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
};

// ---- charts: drawn in the page's colours, again when the colour scheme changes

const THEMES = {
  light: {
    card: "#ffffff", ink: "#1d2430", quiet: "#5d6878", line: "#e4e8ee", supervised: "#2a8f6a", context: "#8893a2",
    category: ["#2f6fd6", "#dd7a2b", "#2a8f6a", "#b3478f", "#7558cf", "#8c8420", "#6b7686"],
  },
  dark: {
    card: "#1a2029", ink: "#e4e8ee", quiet: "#98a3b3", line: "#2d3642", supervised: "#4fbf94", context: "#6a7687",
    category: ["#6ea8fe", "#f0a35e", "#4fbf94", "#e086c3", "#a996f5", "#cfc766", "#98a3b3"],
  },
};
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const charts = read("charts-data");
const views = new Map();

function configuration(theme) {
  const font = getComputedStyle(document.body).fontFamily;
  return {
    background: null,
    font,
    padding: { left: 0, right: 12, top: 4, bottom: 4 },
    view: { stroke: null },
    axis: {
      labelColor: theme.quiet, titleColor: theme.quiet, gridColor: theme.line,
      domainColor: theme.line, tickColor: theme.line, titleFontWeight: "normal",
      labelFontSize: 11.5, titleFontSize: 12, titlePadding: 8, labelPadding: 5, labelSeparation: 8,
    },
    axisY: { minExtent: 50 },
    legend: { labelColor: theme.ink, titleColor: theme.quiet, labelFontSize: 12, labelLimit: 260 },
    range: { category: theme.category },
    mark: { color: theme.category[0] },
    rule: { color: theme.quiet },
    text: { color: theme.quiet, fontSize: 11.5 },
    bar: { cornerRadiusEnd: 1 },
  };
}

async function draw(name) {
  const place = document.getElementById("chart-" + name);
  const theme = THEMES[dark.matches ? "dark" : "light"];
  const text = JSON.stringify(charts[name])
    .replaceAll('"@supervised"', JSON.stringify(theme.supervised))
    .replaceAll('"@quiet"', JSON.stringify(theme.context))
    .replaceAll('"@card"', JSON.stringify(theme.card))
    .replaceAll('"@time"', JSON.stringify(`time (${Intl.DateTimeFormat().resolvedOptions().timeZone})`));
  try {
    views.get(name)?.finalize();
    const spec = { ...JSON.parse(text), description: place.parentElement.querySelector("h3").textContent };
    const drawn = await vegaEmbed(place, spec, {
      actions: false, renderer: "svg", config: configuration(theme), tooltip: { theme: dark.matches ? "dark" : "light" },
    });
    views.set(name, drawn);
    place.dataset.drawn = "yes";
  } catch (error) {
    place.replaceChildren(make("p", "This chart could not be drawn: " + error.message, "failed"));
    throw error;
  }
}

// ---- the numbers behind a chart, as a table and as a file

const TIMES = ["start", "end", "at"];
const named = (column) => column.replaceAll("_", " ") + (TIMES.includes(column) ? " (UTC)" : "");

function addNumbers(name) {
  const spec = charts[name];
  const rows = Object.values(spec.datasets ?? {})[0] ?? (spec.data ?? spec.layer?.[0]?.data)?.values ?? [];
  if (!rows.length) return;
  const columns = Object.keys(rows[0]).filter((key) => !["number", "place"].includes(key));
  const shown = (column, value) => {
    if (value === null || value === undefined) return "";
    if (TIMES.includes(column)) return new Date(value).toISOString().replace("T", " ").slice(0, 19);
    return typeof value === "number" ? String(Number(value.toPrecision(6))) : value;
  };
  const details = make("details");
  details.append(make("summary", "Numbers"));
  details.addEventListener("toggle", () => {
    if (details.childElementCount > 1) return;
    const save = make("button", "Download as CSV");
    save.addEventListener("click", () => {
      const quote = (value) => '"' + String(value).replaceAll('"', '""') + '"';
      const lines = [columns.map(named), ...rows.map((row) => columns.map((column) => shown(column, row[column])))];
      const link = make("a");
      link.href = URL.createObjectURL(new Blob([lines.map((line) => line.map(quote).join(",")).join("\n") + "\n"], { type: "text/csv" }));
      link.download = name + ".csv";
      link.click();
      URL.revokeObjectURL(link.href);
    });
    const table = make("table");
    const head = table.createTHead().insertRow();
    for (const column of columns) head.append(make("th", named(column)));
    const body = table.createTBody();
    for (const row of rows.slice(0, 500)) {
      const line = body.insertRow();
      for (const column of columns) {
        line.append(make("td", shown(column, row[column]), typeof row[column] === "number" ? "number" : ""));
      }
    }
    const scroll = make("div", undefined, "scroll");
    scroll.append(table);
    details.append(save, scroll);
    if (rows.length > 500) details.append(make("p", `The first 500 of ${rows.length}; the file has all.`, "note"));
  });
  document.getElementById("chart-" + name).after(details);
}

// ---- samples: search, sort, pages, and one that is open

const PAGE = 15;
const samples = read("samples-data");
for (const sample of samples) {
  sample.text = sample.turns.map((turn) => turn.map((piece) => piece[0]).join("")).join("");
  const pieces = sample.turns.flat();
  const first = Math.max(0, pieces.findIndex((piece) => piece[2]));
  const length = pieces.slice(first).findIndex((piece) => !piece[2]);
  const end = length > 0 ? first + length : pieces.length;
  sample.start = pieces.slice(first, Math.min(end, first + 40)).map((piece) => piece[0]).join("");
  sample.find = [sample.id, sample.source, sample.row, sample.why, sample.text].join("\n").toLowerCase();
}
const state = { query: "", page: 0, sort: null, up: true, open: null };

function found() {
  const words = state.query.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = samples.filter((sample) => words.every((word) => sample.find.includes(word)));
  if (state.sort) {
    const value = (sample) => (state.sort === "share" ? sample.supervised / sample.tokens : sample[state.sort]);
    chosen.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (state.up ? 1 : -1));
  }
  return chosen;
}

function opened(sample) {
  const cell = make("td");
  cell.colSpan = 6;
  cell.append(make("div", `sample ${sample.id}`, "note"));
  sample.turns.forEach((turn) => {
    const block = make("div", undefined, "turn");
    block.dir = "auto";
    for (const [text, ids, on] of turn) {
      const piece = make("span", text.replaceAll("\n", "↵\n"), on ? "on" : "");
      piece.title = (ids.length > 1 ? "tokens " : "token ") + ids.join(", ");
      block.append(piece);
      if (on) block.classList.add("supervised");
    }
    cell.append(block);
  });
  if (sample.left_out) cell.append(make("p", `${sample.left_out.toLocaleString("en")} tokens in the middle are not shown.`, "note"));
  const row = make("tr", undefined, "open");
  row.append(cell);
  return row;
}

function list() {
  const body = document.querySelector("#samples-table tbody");
  if (!body) return;
  const chosen = found();
  const pages = Math.max(1, Math.ceil(chosen.length / PAGE));
  state.page = Math.min(state.page, pages - 1);
  const lines = [];
  for (const sample of chosen.slice(state.page * PAGE, (state.page + 1) * PAGE)) {
    const row = make("tr", undefined, "row");
    const start = sample.start.replace(/\s+/g, " ").slice(0, 110);
    const name = make("td");
    const open = make("button");
    open.id = "open-" + sample.id;
    open.setAttribute("aria-expanded", String(state.open === sample.id));
    open.append(make("code", sample.id.slice(0, 8)));
    name.append(open);
    const begin = make("td", start, "detail");
    begin.dir = "auto";
    if (sample.why) begin.prepend(make("div", sample.why, sample.refused ? "bad" : "note"));
    row.append(
      name, make("td", sample.source), make("td", sample.row.toLocaleString("en"), "number"),
      make("td", sample.tokens.toLocaleString("en"), "number"),
      make("td", Math.round((100 * sample.supervised) / sample.tokens) + " %", "number"), begin,
    );
    row.addEventListener("click", () => {
      state.open = state.open === sample.id ? null : sample.id;
      list();
      // the button that had the focus is gone
      document.getElementById(open.id).focus();
    });
    lines.push(row);
    if (state.open === sample.id) lines.push(opened(sample));
  }
  if (!lines.length) {
    const row = make("tr");
    const cell = make("td", "No sample has all of these words.");
    cell.colSpan = 6;
    row.append(cell);
    lines.push(row);
  }
  body.replaceChildren(...lines);
  document.getElementById("samples-count").textContent =
    `${chosen.length.toLocaleString("en")} samples, page ${state.page + 1} of ${pages}`;
  document.getElementById("samples-back").disabled = state.page === 0;
  document.getElementById("samples-next").disabled = state.page + 1 >= pages;
}

function watchSamples() {
  const search = document.getElementById("samples-search");
  if (!search) return;
  search.addEventListener("input", () => {
    Object.assign(state, { query: search.value, page: 0 });
    list();
  });
  document.getElementById("samples-back").addEventListener("click", () => {
    state.page -= 1;
    list();
  });
  document.getElementById("samples-next").addEventListener("click", () => {
    state.page += 1;
    list();
  });
  for (const head of document.querySelectorAll("#samples-table th[data-sort]")) {
    const button = head.querySelector("button");
    button.addEventListener("click", () => {
      Object.assign(state, { up: state.sort === head.dataset.sort ? !state.up : true, sort: head.dataset.sort, page: 0 });
      for (const other of document.querySelectorAll("#samples-table th[data-sort]")) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      list();
    });
  }
  for (const link of document.querySelectorAll("a[data-sample]")) {
    link.addEventListener("click", () => {
      search.value = link.dataset.sample;
      Object.assign(state, { query: search.value, page: 0, open: search.value });
      list();
    });
  }
  list();
}

watchSamples();
Object.keys(charts).forEach(addNumbers);
const drawAll = () => Promise.all(Object.keys(charts).map(draw));
dark.addEventListener("change", drawAll);
window.drawn = drawAll();
