/* Rows as a table whose columns sort; `columns`: {name, value, cell, left, cls}. The first `options.first` are drawn, and
   MOST_ROWS at most when all are asked for. */
const MOST_ROWS = 400, FIRST_ROWS = 25;
const classes = (column) => [column.left ? "left" : "", column.cls || ""].join(" ").trim() || null;
function sortable(columns, rows, options) {
  const body = h("tbody");
  let by = options.by ?? null, down = options.down ?? true, wanted = "", limit = options.first ?? FIRST_ROWS;
  const more = h("button", { type: "button", class: "more", onclick: () => { limit = MOST_ROWS; draw(); } });
  const heads = columns.map((column, i) =>
    h("th", { class: classes(column), "aria-sort": "none", scope: "col" },
      column.name ? h("button", { type: "button", onclick: () => { down = by === i ? !down : !column.left; by = i; draw(); } }, column.name) : h("span", { class: "unseen" }, column.label)));
  function draw() {
    heads.forEach((head, i) => head.setAttribute("aria-sort", i !== by ? "none" : down ? "descending" : "ascending"));
    let shown = rows.filter((row) => !wanted || options.text(row).toLowerCase().includes(wanted));
    if (by !== null) {
      const value = columns[by].value;
      shown = shown.map((row, i) => [value(row), i, row]);
      shown.sort((a, b) => (a[0] < b[0] ? -1 : a[0] > b[0] ? 1 : 0) * (down ? -1 : 1) || a[1] - b[1]);
      shown = shown.map((entry) => entry[2]);
    }
    more.hidden = shown.length <= limit;
    more.textContent = shown.length > MOST_ROWS ? `Show ${int(MOST_ROWS)} of ${int(shown.length)}` : `Show all ${int(shown.length)}`;
    if (limit === MOST_ROWS) more.hidden = true;
    body.replaceChildren(...shown.slice(0, limit).map((row) => {
      const attributes = options.row ? options.row(row) : {};
      return h("tr", attributes, columns.map((c, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: classes(c), title: c.title ? c.title(row) : null }, c.cell(row))));
    }));
  }
  draw();
  const table = h("table", { "aria-label": options.label }, h("thead", {}, h("tr", {}, heads)), body);
  return { node: h("div", {}, scrolling(options.label, table), more), table, filter: (text) => { wanted = text.trim().toLowerCase(); draw(); } };
}
