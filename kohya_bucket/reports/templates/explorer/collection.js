/* The images at hand: where they come from, and what their headers say. */

const LANES = 4, TOGETHER = 32; // this many at a time read the heads of so many files
const CAPTIONS = [".caption", ".txt"]; // sd-scripts looks for the first by itself
const folderOf = (path) => path.slice(0, Math.max(0, path.lastIndexOf("/")));

class Collection {
  /* `endings`: of images, in lower case with the dot; `trained`: those that the trainer reads, null for all. */
  constructor(endings, trained) {
    this.endings = new Set(endings);
    this.trained = trained && new Set(trained);
    this.clear();
  }

  clear() {
    this.items = [];
    this.known = new Set();
    this.groups = new Map();
    this.paths = new Map(); // of the images of each group
    this.passedOver = new Map();
    this.texts = new Set();
    this.focusFile = null;
    this.reading = { done: 0, all: 0 };
    this.version = (this.version || 0) + 1;
  }

  /* The folder of an image, with what an epoch repeats it, and the datasets that it belongs to (null: all). */
  group(folder, repeats = 1, datasets = null, captions = null) {
    const key = `${folder}\n${datasets ? datasets.join() : ""}`;
    if (!this.groups.has(key)) this.groups.set(key, { folder, full: folder, repeats, datasets, captions, own: repeats, images: 0 });
    return this.groups.get(key);
  }

  add(item, group) {
    item.group = group;
    group.images++;
    if (this.paths.has(group)) this.paths.get(group).push(item.path); else this.paths.set(group, [item.path]);
    this.items.push(item);
    this.version++;
  }

  /* What Python put into the page: columns of images, their folders, and where they lie. */
  take({ root, base, groups, group, names, sizes, turned, failures }) {
    const mine = groups.map(([folder, repeats, datasets, captions]) => Object.assign(this.group(folder, repeats, datasets, captions), { full: folder ? `${root}/${folder}` : root }));
    const address = base && ((path) => { try { return base + path.split("/").map(encodeURIComponent).join("/"); } catch { return null; } });
    names.forEach((name, i) => {
      const to = mine[group[i]], path = to.folder ? `${to.folder}/${name}` : name;
      this.known.add(path);
      this.add({ path, width: sizes[2 * i], height: sizes[2 * i + 1], orientation: turned[i] || 1, reason: failures[i] || null, url: address && address(path) }, to);
    });
  }

  /* Reads the headers of `found`, an iterable of {path, file()}; calls `tick` now and then. Resolves when all are read. */
  async read(found, tick) {
    const mine = this.version, queue = [];
    const stopped = () => this.stopped > mine;
    for await (const one of found) {
      const dot = one.path.lastIndexOf("."), ending = dot > one.path.lastIndexOf("/") + 1 ? one.path.slice(dot).toLowerCase() : "";
      if (!one.path.split("/").slice(1).every(isListed)) continue;
      if (CAPTIONS.includes(ending)) this.texts.add(one.path);
      if (/(?:^|\/)focus\.jsonl$/.test(one.path) && !this.focusFile) this.focusFile = one;
      else if (!this.endings.has(ending)) this.passedOver.set(ending, (this.passedOver.get(ending) || 0) + 1);
      else if (!this.known.has(one.path)) { this.known.add(one.path); queue.push(one); this.reading.all++; }
      await breathe();
      if (stopped()) return;
    }
    let next = 0;
    const lane = async () => {
      while (next < queue.length && !stopped()) {
        const some = queue.slice(next, next += TOGETHER).map((one) => ({ ...one, item: { path: one.path, width: 0, height: 0, orientation: 1, reason: null } }));
        await Promise.all(some.map(async ({ item, file: open }) => {
          try { item.file = await open(); } catch (error) { item.reason = `it cannot be opened: ${error.message || error.name}`; }
        }));
        const opened = some.map(({ item }) => item).filter((item) => item.file);
        const heads = await Pieces.ofMany(opened.map((item) => item.file)).catch(() => []);
        await Promise.all(opened.map(async (item, i) => Object.assign(item, await readHeader(item.file, heads[i]))));
        for (const { path, item } of some) {
          if (stopped()) return;
          const ending = path.slice(path.lastIndexOf("."));
          if (this.trained && !this.trained.has(ending)) Object.assign(item, { reason: `sd-scripts lists no ${ending} files: kohya-bucket fix converts or renames it`, unlisted: true });
          this.add(item, this.group(folderOf(path), repeatsOf(folderOf(path))));
          this.reading.done++;
          tick();
          await breathe();
        }
      }
    };
    await Promise.all(Array.from({ length: LANES }, lane));
  }

  /* The ending of the captions beside most images of a group; null where there are none. */
  captionsOf(group) {
    if (group.captions) return group.captions;
    const paths = (this.paths.get(group) || []).map((path) => path.replace(/\.[^./]*$/, ""));
    const [most, count] = CAPTIONS.map((ending) => [ending, paths.filter((path) => this.texts.has(path + ending)).length]).sort((a, b) => b[1] - a[1])[0];
    return count ? most : null;
  }

  stop() { this.stopped = ++this.version; this.clear(); }
}

/* `10_name` means ten repeats of images called `name`, as with sd-scripts' --train_data_dir. */
const NAMED = /(?:^|\/)0*([1-9]\d{0,5})_([^/]*)$/;
const repeatsOf = (folder) => +(NAMED.exec(folder)?.[1] || 1);

/* Whether a name in a folder counts, as `list_images` has it. */
const isListed = (name) => !name.startsWith(".") && name !== "__MACOSX";

/* Files of an `<input>`, folders included. */
function* chosenFiles(list) {
  for (const file of list) yield { path: file.webkitRelativePath || file.name, file: async () => file };
}

/* Files below handles of files and folders, of which none is opened before its turn. */
async function* handledFiles(handles) {
  const pending = handles.map((handle) => [handle, handle.name]);
  for (const [handle, path] of pending) { // grows meanwhile
    if (handle.kind === "file") yield { path, file: () => handle.getFile() };
    else for await (const inner of handle.values()) pending.push([inner, `${path}/${inner.name}`]);
  }
}

/* The same of dropped entries, for browsers without handles. Chromium refuses these to a page that is a file itself. */
async function* droppedFiles(entries) {
  const pending = [...entries];
  for (const entry of pending) { // grows meanwhile
    if (entry.isFile) {
      yield { path: entry.fullPath.replace(/^\//, ""), file: () => new Promise((go, fail) => entry.file(go, fail)) };
      continue;
    }
    const reader = entry.createReader();
    for (;;) {
      const some = await new Promise((go, fail) => reader.readEntries(go, fail));
      if (!some.length) break;
      pending.push(...some);
    }
  }
}
