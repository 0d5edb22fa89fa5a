"""Sends callbacks to other processes as data, in a signed file that is valid for one launch.

`callsheet.launch` sends callbacks in this way automatically. With another launcher, such as torchrun:

```python
with callsheet.transport.pack(callbacks).post() as variables:
    subprocess.run(["torchrun", "--nproc_per_node=8", "train.py"], env=os.environ | variables, check=True)
```

and in `train.py`, on every rank:

```python
callbacks = callsheet.transport.unpack()
```
"""

from callsheet.core.optional import needed_by

with needed_by(__name__):
    from callsheet.transport.payload import Payload, pack, unpack
    from callsheet.transport.sealed import TransportError

__all__ = ["Payload", "TransportError", "pack", "unpack"]
