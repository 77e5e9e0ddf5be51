"""A service that ends: whoever comes after its session has been ended hears why."""


def test_a_stream_of_a_session_that_the_ending_took_hears_of_the_ending(start):
    server = start()
    session = server.client().open()
    server.service.drain()
    for ended in server.service.assembly.sessions.pop_all():
        server.service._servicer.end_session(ended, "shutdown")
    assert session.drive().ending().kind == ("UNAVAILABLE", "DRAINING")
