"""Stores in object storage: files below an address, and the shards of them that a node keeps."""
