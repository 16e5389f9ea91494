/* The parts of the report, each a function of the view that it is for. */

/* What is lost leads; the rest of the numbers is smaller. */
function keyNumbers(view) {
  const d = view.data, t = d.summary, what = d.clips ? "clip" : "image", cells = [];
  const cell = (value, label, cls, lead) => cells.push(h("div", { class: lead ? "lead" : null }, h("b", { class: cls || null }, value), h("span", {}, label)));
  const reasons = [[d.broken, "broken"], [d.not_listed, "not listed"], [t.unplaced, "without a bucket"]].filter(([n]) => n);
  const lost = reasons.reduce((sum, [n]) => sum + n, 0), of = (n, one) => (n === 1 ? one : `${one}s`);
  cell(int(lost), `not trained, of ${counted(d.found, what)}${lost ? `: ${reasons.map(([n, why]) => `${int(n)} ${why}`).join(", ")}` : ""}`, lost ? "bad" : "", true);
  cell(percent(t.mean_crop), "cut off, mean", lossClass(t.mean_crop * 2), true);
  cell(percent(t.p95_crop), "cut off of 19 in 20, at most", lossClass(t.p95_crop));
  cell(percent(t.worst_crop), "cut off, worst", lossClass(t.worst_crop));
  cell(percent(t.enlarged), "enlarged", t.enlarged > 0.3 ? "warn" : "");
  cell(int(t.buckets), `${of(t.buckets, "bucket")} used${d.underfilled && !d.clips ? `, ${int(d.underfilled)} never ${d.underfilled === 1 ? "fills" : "fill"} a batch` : ""}`);
  if (d.clips) cell(d.clips.items === null ? "–" : int(d.clips.items), `${of(d.clips.items, "item")} an epoch`);
  else cell(int(t.batches), `${t.batches === 1 ? "batch" : "batches"} an epoch (${d.batches_of}), ${int(t.short_batches)} not full`);
  return h("section", { class: "key num", id: "numbers", "aria-label": "Key numbers" }, cells);
}

function advice(view) {
  return section("advice", "What to change",
    h("p", { class: "soft" }, "The most harmful first. Each line was measured by placing these images again with that one change."),
    h("ul", { class: "advice" }, view.data.advice.map((a) => h("li", {},
      a.setting === "files" ? aboutFiles(view, a) : h("div", { class: "change" }, h("code", {}, a.setting), h("div", {}, withCommands(`${a.current} → `), h("b", {}, withCommands(a.proposed)))),
      h("div", {}, a.why ? h("div", {}, withCommands(`${a.why}.`)) : null,
        a.gain ? h("div", { class: "effect good" }, "Gain: ", withCommands(a.gain)) : null,
        a.cost ? h("div", { class: "effect warn" }, "Cost: ", withCommands(a.cost)) : null)))));
}

/* A problem of the files themselves: how bad it is, what to do, and where they are listed. */
const TAGS = { "stops training": "bad", "not trained": "bad", "harms training": "warn" };
function aboutFiles(view, a) {
  const list = view.data.lists.find((one) => one.key === a.listed && one.count);
  return h("div", { class: "change" }, h("b", {}, a.current), " ", h("span", { class: `tag ${TAGS[a.harm] || "soft"}` }, a.harm), h("div", {}, withCommands(`${a.proposed[0].toUpperCase()}${a.proposed.slice(1)}`)),
    list ? h("button", { type: "button", class: "bare link", onclick: () => view.showList(list) }, "Show the files") : null);
}

function buckets(view) {
  const d = view.data, used = d.buckets.filter((b) => b[2]), idle = d.buckets.length - used.length;
  const most = used.reduce((m, b) => Math.max(m, b[2]), 1);
  const rows = d.buckets.map((b, k) => [b, k]).filter(([b]) => b[2]);
  const meter = (b) => { const bar = h("i", { class: "meter" }); bar.style.width = `${Math.max(1, (100 * b[2]) / most)}%`; return h("span", { class: "meterbox" }, bar); };
  const columns = [
    { name: "Bucket", left: true, value: ([b]) => b[0] * 1e6 + b[1], cell: ([b, k]) => [shapeOf(b), d.sheets.some((sheet) => sheet.bucket === k) ? h("a", { href: `#sheet-${k}`, "aria-label": `${size(b)}: to its contact sheet` }, size(b)) : size(b), b[10] ? h("span", { class: "tag warn" }, "never full") : null] },
    { name: "Aspect", cls: "wide", value: ([b]) => b[0] / b[1], cell: ([b]) => (b[0] / b[1]).toFixed(3) },
    { name: "Images", value: ([b]) => b[2], cell: ([b]) => int(b[2]) },
    { name: "", label: "Share of images", left: true, cls: "wide", value: ([b]) => b[2], cell: ([b]) => meter(b) },
    { name: "Samples", cls: "wide", value: ([b]) => b[3], cell: ([b]) => int(b[3]) },
    { name: "Batches", cls: "wide", value: ([b]) => b[4], cell: ([b]) => int(b[4]) },
    { name: "Last batch", cls: "wide", value: ([b]) => b[5] || b[9], cell: ([b]) => (b[5] ? `${b[5]} of ${b[9]}` : "full") },
    { name: "Cut off, mean", value: ([b]) => b[6], cell: ([b]) => h("span", { class: lossClass(b[6]) }, percent(b[6])) },
    { name: "Worst", value: ([b]) => b[7], cell: ([b]) => h("span", { class: lossClass(b[7]) }, percent(b[7])) },
    { name: "Enlarged", value: ([b]) => b[8], cell: ([b]) => percent(b[8]) },
  ];
  let wanted = null;
  const isAsked = (b) => wanted !== null && b[0] === wanted[0] && b[1] === wanted[1];
  const { node, table } = sortable(columns, rows, {
    by: 1, down: false, label: "Buckets", text: ([b]) => size(b),
    row: ([b, k]) => ({ class: isAsked(b) ? "link here" : "link", "data-bucket": k, onclick: () => { const to = document.getElementById(`sheet-${k}`); if (to) bringIntoView(to, "start"); } }),
  });
  view.listeners.push((asked) => {
    wanted = asked && d.rule ? place(d.rule, asked.width, asked.height).bucket : null;
    for (const row of table.querySelectorAll("tr.link")) row.classList.toggle("here", isAsked(d.buckets[+row.dataset.bucket]));
  });
  const notes = [];
  if (idle) notes.push(`${int(idle)} more ${idle === 1 ? "bucket" : "buckets"} of the set ${idle === 1 ? "holds" : "hold"} no image.`);
  if (rows.length > MOST_ROWS) notes.push(`The first ${int(MOST_ROWS)} of ${int(rows.length)} buckets in the order chosen are shown; kohya-bucket analyze --json lists all.`);
  if (d.rare.count) notes.push(`${int(d.rare.count)} ${d.rare.count === 1 ? "holds" : "hold"} fewer than ${d.rare.below} images.`);
  return section("buckets", "Buckets", notes.length ? h("p", { class: "soft" }, notes.join(" ")) : null, node);
}

/* What other trainers would make of an epoch of these images in these buckets. */
function trainers(view) {
  const number = (name, i) => ({ name, value: (r) => r[i], cell: (r) => h("span", { class: i > 1 && r[i] ? "warn" : null }, int(Math.round(r[i]))) });
  const columns = [{ name: "Trainer", left: true, value: (r) => r[0], cell: (r) => r[0] }, number("Batches", 1), number("Left out", 2), number("Never trained", 3), number("Repeated", 4)];
  return section("trainers", "What an epoch trains",
    h("p", { class: "soft" }, "The plan, and the loaders of trainers as they come if they had these buckets, on one GPU. Left out and repeated are means of up to ten epochs, never trained is in none of them."),
    sortable(columns, view.data.trainers, { label: "What an epoch trains" }).node);
}

/* Orders of the sheets, and of the pictures in each: by what they show, largest first. */
const SHEET_ORDERS = [
  { name: "Fullest bucket", sheet: (b) => b[2], shot: (row) => row[4] },
  { name: "Most cut off", sheet: (b) => b[7], shot: (row) => row[4] },
  { name: "Most enlarged", sheet: (b, rows) => Math.max(...rows.map((row) => row[5])), shot: (row) => row[5] },
];
const FIRST_SHEETS = 2; // on a phone, where what follows is to be within reach

function sheets(view) {
  const d = view.data, used = d.buckets.filter((b) => b[2]).length, left = used - d.sheets.length;
  const body = h("div");
  const made = d.sheets.map((sheet) => {
    const b = d.buckets[sheet.bucket], shots = sheet.shots.map((one) => [one.row, shot(view, b, one)]), box = h("div", { class: "shots" });
    const node = h("section", { class: "sheet", id: `sheet-${sheet.bucket}`, tabindex: "-1", "aria-label": `Bucket ${size(b)}` },
      h("header", {}, h("h3", {}, size(b)), h("span", { class: "soft num" }, cutOff(b[2], b[6], b[7]))), box);
    return { b, shots, box, node };
  });
  const order = choice("Order", SHEET_ORDERS, (by) => {
    const down = (list, value) => [...list].sort((p, q) => value(q) - value(p));
    const sorted = down(made, (one) => by.sheet(one.b, one.shots.map(([row]) => row))).map(({ shots, box, node }) => {
      box.replaceChildren(...down(shots, ([row]) => by.shot(row)).map(([, figure]) => figure));
      return node;
    });
    const first = onPhone.matches ? sorted.slice(0, FIRST_SHEETS) : sorted, others = sorted.slice(first.length);
    body.replaceChildren(h("div", { class: "sheets" }, first), ...(others.length ? [h("details", {}, h("summary", {}, `Show ${counted(others.length, "more bucket")}`), h("div", { class: "sheets" }, others))] : []));
  });
  return section("sheets", "Contact sheets",
    help("What these pictures show", h("p", {}, `What is cut off is tinted. Of each bucket the image that loses most is here, and others spread down to the one that loses least. Point at a picture, or tap it, for its numbers.${left ? ` The ${left === 1 ? "smallest bucket is" : `${int(left)} smallest buckets are`} left out to keep this file small.` : ""}`)),
    order, body);
}

function focusPanel(view) {
  const { text, shots } = view.data.focus;
  return section("focus", "Focus",
    h("p", { class: "soft" }, `${text.replace("focus: ", "")}. ${shots.length ? "The worst of those that the middle would cut, with the rectangle dashed and what is cut off tinted:" : ""}`),
    h("div", { class: "sheet" }, h("div", { class: "shots" }, shots.map((one) => shot(view, view.data.buckets[one.row[3]], one)))));
}

/* One small picture of a sheet: a button that asks about its size. */
function shot(view, bucket, { row, picture, kept: share, focus: marked, caption: beside }) {
  const [name, width, height, , loss, scale] = row, box = h("span", { class: "thumb" });
  const short = inShort(bucket, loss, scale);
  if (picture) {
    const [uri, w, t] = picture, kept = h("span", { class: "kept" });
    box.style.width = `${w}px`;
    box.style.height = `${t}px`;
    const mark = marked ? h("span", { class: "marked" }) : null;
    ["left", "top", "width", "height"].forEach((side, i) => { kept.style[side] = `${100 * share[i]}%`; if (mark) mark.style[side] = `${100 * marked[i]}%`; });
    box.append(h("img", { src: uri, alt: `${name}: ${size([width, height])} to ${short}`, decoding: "async" }), kept, ...(mark ? [mark] : []));
  } else box.append(h("span", { class: "missing" }, `${name}: its pixels do not decode`));
  const marks = [loss ? `−${percent(loss)}` : "uncut", scale > 1.001 ? `×${scale.toFixed(2)}` : null].filter(Boolean).join(", ");
  const caption = h("figcaption", {}, h("b", { class: lossClass(loss) || null }, marks), ` ${name.split("/").pop()}`);
  caption.style.maxWidth = `${picture ? Math.max(picture[1], 110) : 124}px`;
  let by = "";
  const act = () => { if (by !== "touch" || !opens(figure)) view.showSize(width, height); by = ""; };
  const figure = h("figure", { class: "shot", onpointerenter: () => keepInside(figure), onfocusin: () => keepInside(figure) },
    h("button", { type: "button", class: "bare", onpointerdown: (event) => { by = event.pointerType; }, onclick: act }, box), caption,
    h("div", { class: "details" }, [name, `${size([width, height])} → ${short}`, beside].filter(Boolean).map((line) => h("div", {}, line))));
  return figure;
}

/* What is said of a picture opens to the side on which there is room. */
function keepInside(figure) {
  figure.classList.toggle("flip", figure.getBoundingClientRect().left + DETAILS_WIDE > document.documentElement.clientWidth);
}
const DETAILS_WIDE = 250;

/* Whether a tap only opens what is said of a picture: the next one acts. A mouse has shown it before it clicks. */
function opens(figure) {
  if (figure.classList.contains("open")) return false;
  for (const other of document.querySelectorAll(".shot.open")) other.classList.remove("open");
  figure.classList.add("open");
  return true;
}

function lists(view) {
  const d = view.data, lists = d.lists.filter((list) => list.count);
  if (!lists.length) return null;
  const body = h("div"), buttons = lists.map((list) => h("button", { type: "button", onclick: () => show(list) }, list.title, h("span", { class: "num" }, int(list.count))));
  const show = (list) => {
    buttons.forEach((button, i) => button.setAttribute("aria-pressed", lists[i] === list));
    const bucketText = (k) => (k < 0 ? "none" : size(d.buckets[k]));
    const columns = list.kind === "notes"
      ? [{ name: "Image", left: true, value: (r) => r[0], cell: (r) => r[0], cls: "wrap" }, { name: "What", left: true, value: (r) => r[1], cell: (r) => withCommands(r[1]), cls: "wrap" }]
      : [
        { name: "Image", left: true, cls: "name", value: (r) => r[0], cell: (r) => h("button", { type: "button", class: "bare" }, r[0]), title: (r) => r[0] },
        { name: "Size", value: (r) => r[1] * r[2], cell: (r) => size([r[1], r[2]]) },
        { name: "Aspect", cls: "wide", value: (r) => r[1] / r[2], cell: (r) => (r[1] / r[2]).toFixed(3) },
        { name: "Bucket", value: (r) => r[3], cell: (r) => bucketText(r[3]) },
        { name: "Cut off", value: (r) => r[4], cell: (r) => (r[4] < 0 ? "" : h("span", { class: lossClass(r[4]) }, percent(r[4]))) },
        { name: "Scaled", cls: "wide", value: (r) => r[5], cell: (r) => (r[5] < 0 ? "" : `×${r[5].toFixed(2)}`) },
        ...(list.rows.some((r) => r[6]) ? [{ name: "Note", left: true, cls: "wrap", value: (r) => r[6], cell: (r) => withCommands(r[6]) }] : []),
      ];
    const { node, filter } = sortable(columns, list.rows, {
      label: list.title,
      text: (r) => r.join(" "),
      row: (r) => (list.kind === "images" ? { class: "link", onclick: () => view.showSize(r[1], r[2]) } : {}),
    });
    const more = list.count > list.rows.length ? ` The first ${int(list.rows.length)} of ${int(list.count)}; kohya-bucket plan --images lists all.` : "";
    body.replaceChildren(
      h("div", { class: "tools" }, h("span", { class: "soft" }, list.about + more), list.rows.length > 8 ? h("input", { type: "search", placeholder: "filter by name", "aria-label": "Filter", oninput: (event) => filter(event.target.value) }) : null),
      node);
  };
  view.showList = (list) => { show(list); bringIntoView(body, "center"); };
  show(lists[0]);
  const part = section("images", "Images that stand out", h("div", { class: "tabs" }, buttons), body);
  setFolded(part, onPhone.matches);
  return part;
}
