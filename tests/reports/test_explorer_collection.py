"""The explorer's images by folders, of which there may be thousands; its script without a browser."""

import json
import shutil
import subprocess
from importlib import resources

import pytest

SCRIPT = """
let reads = 0;
class Item {
  constructor(path) { this.path = path; }
  get group() { reads++; return this.of; }
  set group(group) { this.of = group; }
}
const images = new Collection([".png"], null);
for (let i = 0; i < 3000; i++) {
  images.add(new Item(`set/${i % 300}/${i}.png`), images.group(`set/${i % 300}`));
  if (i % 2) images.texts.add(`set/${i % 300}/${i}.txt`);
}
const endings = [...images.groups.values()].map((group) => images.captionsOf(group));
const folder = (name, ...inner) => ({ kind: "directory", name, async* values() { yield* inner; } });
const file = (name) => ({ kind: "file", name });
(async () => {
  const paths = [];
  for await (const { path } of handledFiles([folder("top", folder("in", file("a")), file("b"))])) paths.push(path);
  console.log(JSON.stringify({ endings, reads, paths }));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the explorer's script")
def test_the_captions_of_each_folder_are_found_without_looking_at_all_images():
    path = "templates/explorer/collection.js"
    collection = resources.files("kohya_bucket.reports").joinpath(path).read_text(encoding="utf-8")
    done = subprocess.run(["node", "-e", collection + SCRIPT], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["endings"] == [None, ".txt"] * 150
    assert found["reads"] < 3 * 3000
    assert found["paths"] == ["top/b", "top/in/a"]
