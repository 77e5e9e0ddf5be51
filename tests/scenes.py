"""A service with two clients: one misbehaves, the other must not notice."""

from contextlib import contextmanager
from dataclasses import dataclass

from serving import Running
from wire import Client, Sequence, Session, Story


@dataclass
class Scene:
    """The service, the client that misbehaves with its sequence, and the other's sequence."""

    server: Running
    session: Session
    sequence: Sequence
    bystander: Sequence

    @contextmanager
    def undisturbed(self):
        """What happens inside changes neither the sequence nor the bystander, and the service stays healthy."""
        state, digest = self.sequence.state(), self.server.digest(self.sequence.sequence_id)
        pages = self.server.pages()
        before = self.bystander_drafts()
        yield
        assert self.sequence.state() == state
        assert self.server.digest(self.sequence.sequence_id) == digest
        assert self.server.pages() == pages
        assert self.bystander_drafts() == before
        assert self.bystander.session.client.check() == "SERVING"

    def bystander_drafts(self):
        result = self.bystander.propose(4, 1)
        return list(result.drafts), list(result.logprobs)


@contextmanager
def make_scene(server, **session_changes):
    target = f"unix:{server.config.socket}"
    with Client(target) as client, Client(target) as other_client:
        session, other = client.open(**session_changes), other_client.open()
        sequence, bystander = session.sequence(Story(1)), other.sequence(Story(2))
        sequence.catchup(0, 6)
        bystander.catchup(0, 5)
        scene = Scene(server, session, sequence, bystander)
        yield scene
        scene.session.close()
        other.close()
