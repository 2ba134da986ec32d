"""A recording for tests: keeps what it is given."""

from contextlib import contextmanager

from clew.capture import current


class FakeSession:
    def __init__(self):
        self.step = 0
        self.notes = []
        self.media = []
        self.numbers = []

    def log(self, **numbers):
        self.numbers.append(numbers)

    def note(self, kind, data):
        self.notes.append((kind, data))

    def add_media(self, name, data, suffix):
        self.media.append((name, data, suffix))


@contextmanager
def recording():
    session = FakeSession()
    current.push(session)
    try:
        yield session
    finally:
        current.pop(session)
