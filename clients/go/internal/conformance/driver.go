package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/keepalive"

	"example.com/specdraft/clients/go/specdraft"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// driver holds what the runner has named.
type driver struct {
	mu        sync.Mutex
	clients   map[string]*specdraft.Client
	sessions  map[string]*specdraft.Session
	sequences map[string]*specdraft.Sequence
	carries   map[string]specdraft.Carry
	raw       *rawCalls
}

func newDriver() *driver {
	return &driver{
		clients:   map[string]*specdraft.Client{},
		sessions:  map[string]*specdraft.Session{},
		sequences: map[string]*specdraft.Sequence{},
		carries:   map[string]specdraft.Carry{},
		raw:       newRawCalls(),
	}
}

func (d *driver) close() {
	for _, client := range d.clients {
		_ = client.Close() // the runner has ended
	}
	d.raw.close()
}

func find[T any](d *driver, all map[string]T, name string) (T, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	one, ok := all[name]
	if !ok {
		return one, fmt.Errorf("nothing is called %q", name)
	}
	return one, nil
}

func keep[T any](d *driver, all map[string]T, name string, one T) {
	d.mu.Lock()
	defer d.mu.Unlock()
	all[name] = one
}

// operation performs one request, whose line it reads.
type operation func(ctx context.Context, d *driver, line []byte) (any, error)

// typed is an operation that reads its line as Args.
func typed[Args any](do func(context.Context, *driver, Args) (any, error)) operation {
	return func(ctx context.Context, d *driver, line []byte) (any, error) {
		var args Args
		if err := json.Unmarshal(line, &args); err != nil {
			return nil, err
		}
		return do(ctx, d, args)
	}
}

func operations() map[string]operation {
	return map[string]operation{
		"hello":          typed(hello),
		"open":           typed(open),
		"describe":       typed(describeSession),
		"info":           typed(info),
		"close":          typed(closeClient),
		"open_sequence":  typed(openSequence),
		"prefill":        typed(prefill),
		"catchup":        typed(catchup),
		"propose":        typed(propose),
		"catchup_batch":  typed(catchupBatch),
		"propose_batch":  typed(proposeBatch),
		"truncate":       typed(truncate),
		"state":          typed(state),
		"read_drafts":    typed(readDrafts),
		"take_kv":        typed(takeKV),
		"install_kv":     typed(installKV),
		"free_kv":        typed(freeKV),
		"fork":           typed(fork),
		"close_sequence": typed(closeSequence),
		"park":           typed(park),
		"resume":         typed(resume),
		"adopt":          typed(adopt),
		"raw":            typed(rawCall),
		"stream_open":    typed(streamOpen),
		"stream_ask":     typed(streamAsk),
		"stream_close":   typed(streamClose),
	}
}

func hello(context.Context, *driver, struct{}) (any, error) {
	return map[string]string{"language": "go"}, nil
}

type openArgs struct {
	As             string   `json:"as"`
	Target         string   `json:"target"`
	HiddenSource   string   `json:"hidden_source"`
	HiddenDType    string   `json:"hidden_dtype"`
	HiddenWidth    int      `json:"hidden_width"`
	LayerIDs       []uint32 `json:"layer_ids"`
	VocabSize      int      `json:"vocab_size"`
	Memory         string   `json:"memory"`
	Slots          int      `json:"slot_count"`
	MaxDrafts      int      `json:"max_drafts"`
	PrefillRows    int      `json:"prefill_rows"`
	TimeoutMs      int64    `json:"timeout_ms"`
	ClientName     string   `json:"client_name"`
	CarryKey       []byte   `json:"carry_key"`
	WithMasks      bool     `json:"with_masks"`
	CarriesMax     int      `json:"carries_max"`
	CarryTokensMax int      `json:"carry_tokens_max"`
	Unary          bool     `json:"unary"`
	KeepaliveMs    int64    `json:"keepalive_ms"`
}

func open(ctx context.Context, d *driver, args openArgs) (any, error) {
	options := []specdraft.Option{specdraft.WithTimeout(time.Duration(args.TimeoutMs) * time.Millisecond)}
	if args.KeepaliveMs > 0 {
		allowShortPings()
		often := time.Duration(args.KeepaliveMs) * time.Millisecond
		options = append(options, specdraft.WithKeepalive(keepalive.ClientParameters{Time: often, Timeout: 10 * time.Second}))
	}
	client, err := specdraft.Dial(ctx, args.Target, options...)
	if err != nil {
		return nil, err
	}
	session, err := client.OpenSession(ctx, specdraft.SessionOptions{
		HiddenSource:   pb.HiddenSource(enum(pb.HiddenSource_value, "HIDDEN_SOURCE_", args.HiddenSource)),
		HiddenDType:    dtype(args.HiddenDType),
		HiddenWidth:    args.HiddenWidth,
		LayerIDs:       args.LayerIDs,
		VocabSize:      args.VocabSize,
		Memory:         memoryKind(args.Memory),
		Slots:          args.Slots,
		MaxDrafts:      args.MaxDrafts,
		PrefillRows:    args.PrefillRows,
		ClientName:     args.ClientName,
		CarryKey:       args.CarryKey,
		WithMasks:      args.WithMasks,
		CarriesMax:     args.CarriesMax,
		CarryTokensMax: args.CarryTokensMax,
		Unary:          args.Unary,
	})
	if err != nil {
		_ = client.Close() // the session's error is the one to tell
		return nil, err
	}
	keep(d, d.clients, args.As, client)
	keep(d, d.sessions, args.As, session)
	for index, carry := range session.Carries() {
		keep(d, d.carries, fmt.Sprintf("%s.carries.%d", args.As, index), carry)
	}
	return sessionFacts(session), nil
}

type named struct {
	Of string `json:"of"`
}

func describeSession(_ context.Context, d *driver, args named) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	return sessionFacts(session), nil
}

func sessionFacts(session *specdraft.Session) any {
	carries := make([]carryFacts, 0)
	for _, one := range session.Carries() {
		carries = append(carries, sayCarry(one))
	}
	return map[string]any{
		"memory":       strings.ToLower(strings.TrimPrefix(session.MemoryKind().String(), "MEMORY_KIND_")),
		"max_drafts":   session.MaxDrafts(),
		"hidden_width": session.HiddenWidth(),
		"driving":      session.IsDriving(),
		"carries":      carries,
	}
}

func info(ctx context.Context, d *driver, args named) (any, error) {
	client, err := find(d, d.clients, args.Of)
	if err != nil {
		return nil, err
	}
	found, err := client.ServerInfo(ctx)
	if err != nil {
		return nil, err
	}
	return asJSON(found)
}

func closeClient(_ context.Context, d *driver, args named) (any, error) {
	client, err := find(d, d.clients, args.Of)
	if err != nil {
		return nil, err
	}
	_ = client.Close() // as the twin's, which never tells: the service may be gone
	return nil, nil
}

func enum(values map[string]int32, prefix, name string) int32 {
	return values[prefix+strings.ToUpper(name)]
}

func dtype(name string) specdraft.DType {
	return specdraft.DType(enum(pb.DType_value, "D_TYPE_", name))
}

func memoryKind(name string) specdraft.MemoryKind {
	return specdraft.MemoryKind(enum(pb.MemoryKind_value, "MEMORY_KIND_", name))
}
