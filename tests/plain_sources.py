"""A checkpoint that needs no file: full tensors in memory."""

from titanlite.materialize.layout import write_rows
from titanlite.materialize.sources import Read


class Checkpoint:
    """A source of every tensor that `reader` has. It is strict: missing and unexpected names are
    errors.
    """

    def __init__(self, reader):
        self.name, self.complete, self._reader = f"checkpoint {reader.name}", True, reader

    def __call__(self, tensors):
        return [
            (name, Read(self._reader, name, tuple(x.shape)))
            for name, x in self._reader.state_dict.items()
        ]


class StateDictReader:
    """Reads from full tensors in memory, a state dict of the unsharded model."""

    def __init__(self, state_dict, name="state dict"):
        self.name, self.state_dict, self.proves_coverage = name, state_dict, False

    def read(self, requests):
        for request in requests:
            values = self.state_dict[request.name][request.region.slices]
            if request.encoding is None:
                request.destination.copy_(values)
            else:
                values = values.to(request.destination.device)
                rows = request.encoding.encode(values.reshape(-1, values.shape[-1]))
                write_rows(rows, request.destination, request.region, request.region)
