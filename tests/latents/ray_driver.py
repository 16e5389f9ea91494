"""A run in a process of its own that hands out work, so that it can be killed: IMAGES OUTPUT LOG SECONDS."""

import sys
from functools import partial
from pathlib import Path

from kohya_bucket.latents.items import EncodeOptions, LatentItems
from kohya_bucket.latents.on_ray import Actors, encode_on_ray
from tests.latents.ray_encoders import Telling
from tests.latents.stub_encoders import dataset_of

if __name__ == "__main__":
    images, output, log = map(Path, sys.argv[1:4])
    data = dataset_of(sorted(images.glob("*.png")))
    paths = [str(path) for path in data.paths]
    wanted = LatentItems.from_placement(
        paths, data.sizes, data.placement, EncodeOptions("mean", "float32"), images, captions=paths
    )
    with Actors(partial(Telling, log, float(sys.argv[4])), 2) as crew:
        encode_on_ray(wanted, crew, output, images, batch_size=2)
