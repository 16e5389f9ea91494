/* Pictures of images as they are stored, made when they come into sight. */

/* Browsers turn an image as its EXIF asks, unless a style forbids it, which is for files given to the page; this turns others back. */
const TURN_BACK = { 2: "scaleX(-1)", 3: "rotate(180deg)", 4: "scaleY(-1)", 5: "matrix(0,1,1,0,0,0)", 6: "rotate(-90deg)", 7: "matrix(0,-1,-1,0,0,0)", 8: "rotate(90deg)" };

/* A picture of `item` in a box of this size. Its file is opened now, and let go when `release` is called. */
function storedPicture(item, width, height) {
  const img = h("img", { alt: "", decoding: "async", draggable: "false" }), node = h("span", { class: "stored" }, img);
  const lay = (turned) => {
    const lying = turned && item.orientation >= 5, style = { width: lying ? height : width, height: lying ? width : height, left: lying ? (width - height) / 2 : 0, top: lying ? (height - width) / 2 : 0 };
    for (const [name, pixels] of Object.entries(style)) img.style[name] = `${pixels}px`;
    img.style.transform = turned ? TURN_BACK[item.orientation] || "" : "";
  };
  // Chromium turns JPEG and PNG, and not WebP; where the sides differ, the picture itself tells.
  lay(!item.file && item.orientation > 1 && !/\.webp$/i.test(item.path));
  img.addEventListener("load", () => { if (!item.file && item.orientation >= 5 && item.width !== item.height) lay((img.naturalWidth > img.naturalHeight) !== (item.width > item.height)); });
  const address = item.file ? URL.createObjectURL(item.file) : item.url;
  img.addEventListener("error", () => { node.classList.add("missing"); node.textContent = item.file ? "no preview" : "not found"; });
  if (address) img.src = address; else img.dispatchEvent(new Event("error"));
  return { node, img, release: () => { if (item.file) URL.revokeObjectURL(address); img.removeAttribute("src"); } };
}

/* Fills boxes with pictures while they are in sight or near it, so many at a time. */
class Thumbs {
  constructor(most = 6) {
    this.most = most;
    this.busy = 0;
    this.wanted = new Map();
    this.shown = new Map();
    this.watch = new IntersectionObserver((seen) => {
      for (const { target, isIntersecting } of seen) {
        if (isIntersecting && !this.shown.has(target)) this.wanted.set(target, target.image);
        else if (!isIntersecting) this.wanted.delete(target);
      }
      this.next();
    }, { rootMargin: "150px 0px" });
  }

  add(box, item, width, height) {
    box.image = { item, width, height };
    this.watch.observe(box);
  }

  remove(box) {
    this.watch.unobserve(box);
    this.wanted.delete(box);
    this.shown.get(box)?.();
    this.shown.delete(box);
  }

  next() {
    for (const [box, { item, width, height }] of this.wanted) {
      if (this.busy >= this.most) return;
      this.wanted.delete(box);
      this.busy++;
      const { node, img, release } = storedPicture(item, width, height);
      let loading = true;
      const ready = () => { if (loading) loading = false, this.busy--, this.next(); };
      this.shown.set(box, () => { release(); ready(); }); // what is released while it loads fires no event
      if (!img.src) ready();
      else img.addEventListener("load", ready, { once: true }), img.addEventListener("error", ready, { once: true });
      box.prepend(node);
    }
  }
}
