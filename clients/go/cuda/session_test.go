package cuda

import (
	"errors"
	"testing"

	"go.uber.org/goleak"

	"example.com/specdraft/clients/go/internal/fakedrafter"
	"example.com/specdraft/clients/go/specdraft"
)

// A goroutine that outlives the tests fails them.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// startService grants arenas in the fake driver's memory.
func startService(t *testing.T, fake *fakeDriver, on UUID) (*fakedrafter.Service, *specdraft.Client) {
	t.Helper()
	service, err := fakedrafter.Start(fakedrafter.Options{Device: &fakedrafter.DeviceMemory{
		UUID: on,
		Export: func(size int) ([64]byte, []byte) {
			handle := fake.export(size)
			return handle, fake.exported[handle]
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	client, err := specdraft.Dial(t.Context(), service.Target())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return service, client
}

func TestRowsGoThroughTheHandleOfASessionsArena(t *testing.T) {
	fake, device := openFake(t)
	service, client := startService(t, fake, uuid(2))
	session, err := client.OpenSession(t.Context(), specdraft.SessionOptions{Memory: specdraft.MemoryCUDA, Device: device, Slots: 2})
	if err != nil || session.MemoryKind() != specdraft.MemoryCUDA {
		t.Fatal(err) // the first KeepAlive proved the mapping with the nonce that lies in it
	}
	sequence, err := session.OpenSequence(t.Context(), specdraft.SequenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const count = 40
	values, tokens := make([]float32, count*fakedrafter.Width), make([]uint32, count)
	for index := range values {
		values[index] = float32(index)
	}
	rows := specdraft.Float32Rows(values, fakedrafter.Width)
	if state, err := sequence.Prefill(t.Context(), tokens, rows); err != nil || state.RowCount != count-1 {
		t.Fatalf("%+v %v", state, err)
	}
	pairs := specdraft.Pairs{FirstKey: count - 1, Tokens: []uint32{1, 2}, Hiddens: rows.Slice(3, 5)}
	if proposal, err := sequence.Propose(t.Context(), pairs, specdraft.Draft{Count: 2}); err != nil || len(proposal.Drafts) != 2 {
		t.Fatalf("%+v %v", proposal, err)
	}
	for key, row := range service.Rows(sequence.ID()) {
		want := int(key) // the staging area's, chunk by chunk
		if key >= count-1 {
			want = int(key) - (count - 1) + 3 // the slot's
		}
		if row != string(rows.Slice(want, want+1).Bytes()) {
			t.Errorf("row %d is another", key)
		}
	}
	if err := session.Close(t.Context()); err != nil || len(fake.opened) != 0 {
		t.Errorf("%v, %d allocations open", err, len(fake.opened))
	}
}

func TestAServiceOnAnotherGPUIsToldApart(t *testing.T) {
	fake, device := openFake(t)
	_, client := startService(t, fake, uuid(7))
	_, err := client.OpenSession(t.Context(), specdraft.SessionOptions{Memory: specdraft.MemoryCUDA, Device: device})
	if !errors.Is(err, specdraft.ReasonGPUUUIDNotVisible) {
		t.Error(err)
	}
}
