/* Pictures of images as they are stored, made when they come into sight. */

/* Browsers turn an image as its EXIF asks; this turns it back. */
const TURN_BACK = { 2: "scaleX(-1)", 3: "rotate(180deg)", 4: "scaleY(-1)", 5: "matrix(0,1,1,0,0,0)", 6: "rotate(-90deg)", 7: "matrix(0,-1,-1,0,0,0)", 8: "rotate(90deg)" };

/* A picture of `item` in a box of this size. Its file is opened now, and let go when `release` is called. */
function storedPicture(item, width, height) {
  const lying = item.orientation >= 5, img = h("img", { alt: "", decoding: "async", draggable: "false" });
  img.style.width = `${lying ? height : width}px`;
  img.style.height = `${lying ? width : height}px`;
  if (lying) {
    img.style.left = `${(width - height) / 2}px`;
    img.style.top = `${(height - width) / 2}px`;
  }
  if (item.orientation > 1) img.style.transform = TURN_BACK[item.orientation];
  const address = item.file ? URL.createObjectURL(item.file) : item.url;
  const node = h("span", { class: "stored" }, img);
  img.addEventListener("error", () => { node.classList.add("missing"); node.textContent = item.file ? "no preview" : "not found"; });
  if (address) img.src = address; else img.dispatchEvent(new Event("error"));
  return { node, release: () => { if (item.file) URL.revokeObjectURL(address); img.removeAttribute("src"); } };
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
      const { node, release } = storedPicture(item, width, height), img = node.firstChild;
      this.shown.set(box, release);
      const ready = () => { this.busy--; this.next(); };
      if (!img.src) ready();
      else img.addEventListener("load", ready, { once: true }), img.addEventListener("error", ready, { once: true });
      box.prepend(node);
    }
  }
}
