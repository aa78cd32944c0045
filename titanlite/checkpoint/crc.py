"""CRC-32 of a file from the parts that several ranks write, in any order and without reading the file back.

CRC-32 is linear: the checksum of a file is the exclusive or of its parts' checksums, each moved past the bytes that
follow it. Moving past n bytes multiplies by x^(8n) modulo the polynomial; `zlib.crc32` of the finished file gives the
same number.
"""

import numpy as np

_POLYNOMIAL = np.uint32(0xEDB88320)  # reflected, as zlib has it: the highest bit is x^0


def combine(crcs: np.ndarray, bytes_after: np.ndarray) -> int:
    """Exclusive or of `crcs` (N,), each moved past its `bytes_after` (N,).

    Over all parts of a file this is the file's checksum; over those of one rank, that rank's share of it.
    """
    if not len(crcs):
        return 0
    moved = crcs.astype(np.uint32)
    power = np.full(1, 1 << 30, dtype=np.uint32)  # x^1
    for _ in range(3):  # to x^8: one byte
        power = _multiply(power, power)
    rest = bytes_after.astype(np.int64)
    while rest.any():
        odd = (rest & 1).astype(bool)
        moved[odd] = _multiply(moved[odd], np.broadcast_to(power, (int(odd.sum()),)))
        power = _multiply(power, power)
        rest = rest >> 1
    return int(np.bitwise_xor.reduce(moved))


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of polynomials over GF(2), modulo the CRC's polynomial."""
    product, b = np.zeros_like(a), b.copy()
    for bit in range(31, -1, -1):
        product ^= np.where((a >> np.uint32(bit)) & np.uint32(1), b, np.uint32(0))
        b = (b >> np.uint32(1)) ^ np.where(b & np.uint32(1), _POLYNOMIAL, np.uint32(0))
    return product
