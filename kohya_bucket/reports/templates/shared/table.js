/* Rows as a table whose columns sort; `columns`: {name, value, cell, left, cls}. At most MOST_ROWS are drawn. */
const MOST_ROWS = 400;
function sortable(columns, rows, options) {
  const body = h("tbody");
  let by = options.by ?? null, down = options.down ?? true, wanted = "";
  const heads = columns.map((column, i) =>
    h("th", { class: column.left ? "left" : null, "aria-sort": "none", scope: "col" },
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
    body.replaceChildren(...shown.slice(0, MOST_ROWS).map((row) => {
      const attributes = options.row ? options.row(row) : {};
      return h("tr", attributes, columns.map((c, i) => h(i ? "td" : "th", { scope: i ? null : "row", class: [c.left ? "left" : "", c.cls || ""].join(" ").trim() || null, title: c.title ? c.title(row) : null }, c.cell(row))));
    }));
  }
  draw();
  const table = h("table", { "aria-label": options.label }, h("thead", {}, h("tr", {}, heads)), body);
  return { table, filter: (text) => { wanted = text.trim().toLowerCase(); draw(); } };
}
