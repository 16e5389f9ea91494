"""Whatever the package reads is opened by `kohya_bucket.inputs`: no pipe is waited for, and no device is read."""

import ast
from pathlib import Path

import pytest

import kohya_bucket
from tests.package.test_one_writer import writes

PACKAGE = Path(kohya_bucket.__file__).parent

READERS = {
    "read_bytes", "read_text", "fromfile", "memmap", "open_memmap", "loadtxt", "genfromtxt", "safe_open", "OSFile",
    "memory_map", "ParquetFile", "read_table", "read_schema", "read_json", "read_csv", "ZipFile", "TarFile",
}  # fmt: skip
OPENERS = ("io", "os", "Image", "tarfile", "av", "gzip", "codecs", "zipfile", "wave")  # whose `open` takes a name
# (file, call): why it may
ALLOWED = {
    ("inputs.py", "os.open(path, READING)"): "the opener itself",
    ("images/headers.py", "os.open(path, READING)"): "as the opener does, and asks whether it is a file where it must",
    ("images/image_rows.py", "pq.ParquetFile(source, buffer_size=_BUFFER, pre_buffer=False)"): "looked at before",
    ("images/clips.py", "av.open(path)"): "looked at before, by `read_clip`",
    ("latents/vae/diffusers_vae.py", "importlib.import_module('safetensors').safe_open(str(path), framework='pt')"):
        "the VAE, which is trusted",
    ("trainers/door/trial.py", "opened.open(quiet=True)"): "a door, not a file",
    ("trainers/door/environment.py", "(Path(spec.origin).parent / 'version.py').read_text(encoding='utf-8')"):
        "torch's own",
    ("extras.py", "metadata.distribution('kohya-bucket').read_text('direct_url.json')"): "this package's own",
    ("buckets/set_files.py", "(_PRESETS / f'{name}.toml').read_text(encoding='utf-8')"): "this package's own",
    ("reports/one_file.py", "resources.files('kohya_bucket.reports').joinpath('templates', *name.split('/'))"
     ".read_text(encoding='utf-8')"): "this package's own",
    ("files.py", "os.open(path, os.O_RDONLY)"): "a folder, to sync it",
    ("cli/group.py", "os.open(os.devnull, os.O_WRONLY)"): "writes",
    ("trainers/musubi/cache_files.py", "temporary.read_bytes()"): "what was just written",
    ("latents/store/layout.py", "path.read_bytes()"): "an object in object storage",
    # of what is open, or in memory
    ("images/arrow_files.py", "pq.ParquetFile(opened)"): "",
    ("images/arrow_files.py", "pq.ParquetFile(pa.BufferReader(data))"): "",
    ("images/size_table.py", "pq.read_schema(io.BytesIO(data))"): "",
    ("images/tar_index.py", "tarfile.open(fileobj=file, mode='r:', tarinfo=_TarMember)"): "",
    ("trainers/sdscripts/npz/read_write.py", "zipfile.ZipFile(self._file)"): "",
    ("trainers/sdscripts/npz/read_write.py", "zipfile.ZipFile(out, 'w')"): "",
    ("cli/commands/simulate.py", "Image.open(open_input(file))"): "",
    ("images/by_pillow.py", "Image.open(io.BytesIO(b''.join([*parts, _NO_PIXELS])))"): "",
    ("datasets/sources.py", "Image.open(io.BytesIO(encoded), formats=[str(image.format)])"): "",
    ("images/mending.py", "Image.open(io.BytesIO(content))"): "",
    **{(file, "Image.open(file)"): "" for file in (
        "images/by_pillow.py", "images/pixels.py", "trainers/musubi/caches.py", "reports/pictures.py",
        "images/mending.py",
    )},
}  # fmt: skip
# of the same names, which read no file
OTHERS = {
    # `read_table` of a parsed config
    "trainers/door/config_source.py", "trainers/sdscripts/config/check.py", "trainers/musubi/config.py",
    "texts.py",  # `read_text`, by the opener
}  # fmt: skip


def reads(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id == "open" and not writes(call)
    if not isinstance(call.func, ast.Attribute):
        return False
    name, owner = call.func.attr, call.func.value
    if name == "open":  # of a path `file.open()`, of a module `module.open(file)`; of an archive a member
        of_path = isinstance(owner, ast.Name) and not call.args and owner.id not in ("DOOR", "door")
        return of_path or (isinstance(owner, ast.Name) and owner.id in OPENERS)
    if name in ("load", "loads") and isinstance(owner, ast.Name):
        return owner.id in ("np", "torch") or (owner.id == "toml" and name == "load")
    return name in READERS


@pytest.mark.long
def test_nothing_is_opened_past_the_one_opener() -> None:
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and reads(node) and file not in OTHERS:
                found.add((file, ast.unparse(node)))
    assert found == ALLOWED.keys()
