"""Messages that are well-formed and nothing else: any field, any value that its type holds."""

import math
import random

from google.protobuf.descriptor import FieldDescriptor as Field

NUMBERS = {
    Field.TYPE_INT32: (-(2**31), -1, 0, 1, 2, 7, 2**31 - 1),
    Field.TYPE_INT64: (-(2**63), -1, 0, 1, 2, 3, 5, 8, 199, 200, 2**31, 2**63 - 1),
    Field.TYPE_UINT32: (0, 1, 2, 3, 4, 5, 127, 128, 2**31, 2**31 + 5, 2**32 - 1),
    Field.TYPE_FIXED32: (0, 1, 2**31, 2**32 - 1),
    Field.TYPE_UINT64: (0, 1, 2, 3, 2**63, 2**64 - 1),
    Field.TYPE_FLOAT: (0.0, -0.1, -1e30, 1e30, math.nan, math.inf, -math.inf),
    Field.TYPE_ENUM: (0, 1, 2, 3, 4, 99, -1),
    Field.TYPE_BOOL: (False, True),
}
TEXTS = ("", "x", "ä" * 40, "\x00\n\r%s{}", "f" * 3000, "00000000-0000-4000-8000-000000000000")


class Wild:
    """Fills messages from a seed.

    Args:
        seed: the same seed makes the same messages.
        known: byte strings worth trying: ids of this session and of others, hidden rows.
        presence: how likely a field is set.
    """

    def __init__(self, seed, known=(), presence=0.6):
        self.random = random.Random(seed)
        self.known = [b"", b"x", bytes(16), bytes(17), bytes(300), *known]
        self.presence = presence

    def fill(self, message, depth=0):
        """Sets fields of `message`, and returns it."""
        for field in message.DESCRIPTOR.fields:
            if self.random.random() > self.presence:
                continue
            if field.is_repeated:
                self._fill_repeated(message, field, depth)
            elif field.type == Field.TYPE_MESSAGE:
                getattr(message, field.name).SetInParent()
                self.fill(getattr(message, field.name), depth + 1)
            else:
                setattr(message, field.name, self._value(field))
        return message

    def _fill_repeated(self, message, field, depth):
        count = self.random.choice((0, 1, 1, 2, 3, 3, 5, 40))
        if field.type == Field.TYPE_MESSAGE:
            for _ in range(min(count, 6)):
                self.fill(getattr(message, field.name).add(), depth + 1)
        else:
            getattr(message, field.name).extend(self._value(field) for _ in range(count))

    def _value(self, field):
        if field.type == Field.TYPE_BYTES:
            return self.random.choice(self.known)
        if field.type == Field.TYPE_STRING:
            return self.random.choice(TEXTS)
        return self.random.choice(NUMBERS[field.type])

    def bytes(self):
        """Random bytes, or a message's with a few of them changed, are for the caller to choose."""
        return self.random.randbytes(self.random.choice((0, 1, 5, 40, 300)))

    def damaged(self, data):
        """The same bytes, some changed, cut or doubled."""
        changed = bytearray(data)
        for _ in range(self.random.randint(0, 4)):
            if changed:
                changed[self.random.randrange(len(changed))] = self.random.randrange(256)
        end = self.random.randint(0, len(changed))
        return bytes(changed[:end] if self.random.random() < 0.3 else changed + changed[:end])
