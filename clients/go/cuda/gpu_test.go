package cuda

import (
	"encoding/json"
	"os"
	"slices"
	"testing"

	"example.com/specdraft/clients/go/specdraft"
)

// The variables that let these tests run. tests/e2e/test_go_on_gpu.py sets them all; by hand, on a machine with a GPU:
//
//	CGO_ENABLED=0 go test -c ./cuda
//	SPECDRAFT_CUDA_UUID=GPU-... SPECDRAFT_CUDA_TARGET=unix:///run/specdraft/specdraft.sock ./cuda.test -test.run OnAGPU -test.v
const (
	uuidVariable   = "SPECDRAFT_CUDA_UUID"
	targetVariable = "SPECDRAFT_CUDA_TARGET"
	// draftsVariable names a file: the drafts that the Python client got for the same pairs through its CUDA handle.
	draftsVariable = "SPECDRAFT_CUDA_DRAFTS"
)

func onAGPU(t *testing.T) *Device {
	t.Helper()
	said := os.Getenv(uuidVariable)
	if said == "" {
		t.Skip(uuidVariable + " names no GPU")
	}
	named, err := ParseUUID(said)
	if err != nil {
		t.Fatal(err)
	}
	device, err := Open(named)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	return device
}

func TestCountersOnAGPU(t *testing.T) {
	device := onAGPU(t)
	ready, done := counters(t, device)
	stream, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for ticket := uint64(1); ticket <= 100; ticket++ {
		if stream.Wait(ready, ticket) != nil || stream.Write(done, ticket) != nil {
			t.Fatal("the stream takes no work")
		}
		if done.Load() >= ticket {
			t.Fatalf("ticket %d did not wait", ticket)
		}
		ready.Store(ticket)
		if err := stream.Synchronize(); err != nil || done.Load() != ticket {
			t.Fatalf("ticket %d: %v, done %d", ticket, err, done.Load())
		}
	}
	if err := stream.Wait(ready, 1000); err != nil {
		t.Fatal(err)
	}
	ready.Release()
	if err := stream.Synchronize(); err != nil {
		t.Fatal(err)
	}
	if err := stream.Close(); err != nil {
		t.Error(err)
	}
}

// Rows that go through the CUDA handle give the drafts of rows inside the messages.
func TestDraftsOnAGPU(t *testing.T) {
	device := onAGPU(t)
	target := os.Getenv(targetVariable)
	if target == "" {
		t.Skip(targetVariable + " names no service")
	}
	client, err := specdraft.Dial(t.Context(), target)
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	inline := draftsOf(t, client, specdraft.SessionOptions{Memory: specdraft.MemoryInline})
	shared := draftsOf(t, client, specdraft.SessionOptions{Memory: specdraft.MemoryCUDA, Device: device, Slots: 2, PrefillRows: 8})
	if !slices.Equal(inline, shared) || len(inline) == 0 {
		t.Errorf("%v through messages, %v through the handle", inline, shared)
	}
	if path := os.Getenv(draftsVariable); path != "" {
		if python := draftsIn(t, path); !slices.Equal(python, shared) {
			t.Errorf("%v in Python, %v here", python, shared)
		}
	}
}

func draftsIn(t *testing.T, path string) []uint32 {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var drafts []uint32
	if err := json.Unmarshal(text, &drafts); err != nil {
		t.Fatal(err)
	}
	return drafts
}

func draftsOf(t *testing.T, client *specdraft.Client, options specdraft.SessionOptions) []uint32 {
	t.Helper()
	session, err := client.OpenSession(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	defer session.Close(t.Context())
	sequence, err := session.OpenSequence(t.Context(), specdraft.SequenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const prompt = 40
	width := session.HiddenWidth()
	values, tokens := make([]float32, prompt*width), make([]uint32, prompt)
	for index := range values {
		values[index] = float32(index*7919%1000)/500 - 1
	}
	for index := range tokens {
		tokens[index] = uint32(index * 37 % 100)
	}
	rows := specdraft.Float32Rows(values, width)
	if _, err := sequence.Prefill(t.Context(), tokens, rows); err != nil {
		t.Fatal(err)
	}
	var all []uint32
	for key := int64(prompt - 1); key < prompt+9; key++ {
		at := int(key) % prompt
		pairs := specdraft.Pairs{FirstKey: key, Tokens: tokens[at : at+1], Hiddens: rows.Slice(at, at+1)}
		proposal, err := sequence.Propose(t.Context(), pairs, specdraft.Draft{Count: min(3, session.MaxDrafts())})
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, proposal.Drafts...)
	}
	return all
}
