package main

import (
	"context"

	"example.com/specdraft/clients/go/specdraft"
)

type carryFacts struct {
	Ranges [][2]int64 `json:"ranges"`
	Label  string     `json:"label"`
	ID     []byte     `json:"kv_id"`
}

func sayCarry(carry specdraft.Carry) carryFacts {
	return carryFacts{sayRanges(carry.Ranges), carry.Label, carry.ID}
}

type takeArgs struct {
	Of    string `json:"of"`
	As    string `json:"as"`
	Label string `json:"label"`
}

func takeKV(ctx context.Context, d *driver, args takeArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	carry, err := sequence.TakeKV(ctx, args.Label)
	if err != nil {
		return nil, err
	}
	keep(d, d.carries, args.As, carry)
	return sayCarry(carry), nil
}

type installArgs struct {
	Of            string `json:"of"`
	Carry         string `json:"carry"`
	KeepKeysBelow *int64 `json:"keep_keys_below"`
	Fingerprint   string `json:"head_fingerprint"`
}

func installKV(ctx context.Context, d *driver, args installArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	carry, err := find(d, d.carries, args.Carry)
	if err != nil {
		return nil, err
	}
	if args.Fingerprint != "" {
		carry.HeadFingerprint = args.Fingerprint
	}
	found, err := sequence.InstallKV(ctx, carry, args.KeepKeysBelow)
	return sayState(found), err
}

type freeArgs struct {
	Of    string `json:"of"`
	Carry string `json:"carry"`
}

func freeKV(ctx context.Context, d *driver, args freeArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	carry, err := find(d, d.carries, args.Carry)
	if err != nil {
		return nil, err
	}
	return nil, session.FreeKV(ctx, carry)
}

type forkArgs struct {
	Of            string `json:"of"`
	As            string `json:"as"`
	KeepKeysBelow int64  `json:"keep_keys_below"`
	BudgetTokens  int    `json:"budget_tokens"`
}

func fork(ctx context.Context, d *driver, args forkArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	forked, err := sequence.Fork(ctx, args.KeepKeysBelow, args.BudgetTokens)
	if err != nil {
		return nil, err
	}
	keep(d, d.sequences, args.As, forked)
	found, err := forked.KnownState(ctx)
	return sayState(found), err
}

type parkArgs struct {
	Of           string   `json:"of"`
	Sequence     string   `json:"sequence"`
	As           string   `json:"as"`
	Tokens       []uint32 `json:"tokens"`
	Conversation string   `json:"conversation"`
}

func park(ctx context.Context, d *driver, args parkArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	sequence, err := find(d, d.sequences, args.Sequence)
	if err != nil {
		return nil, err
	}
	carry, err := session.Park(ctx, sequence, args.Tokens, args.Conversation)
	if err != nil {
		return nil, err
	}
	keep(d, d.carries, args.As, carry)
	return sayCarry(carry), nil
}

type resumeArgs struct {
	openSequenceArgs
	Tokens       []uint32 `json:"tokens"`
	Conversation string   `json:"conversation"`
	KeepCarry    bool     `json:"keep_carry"`
}

func resume(ctx context.Context, d *driver, args resumeArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	resumed, err := session.Resume(ctx, args.Tokens, specdraft.ResumeOptions{
		Conversation: args.Conversation,
		BudgetTokens: args.BudgetTokens,
		Rows:         args.policy(),
		KeepCarry:    args.KeepCarry,
	})
	if err != nil {
		return nil, err
	}
	keep(d, d.sequences, args.As, resumed.Sequence)
	return map[string]any{"keys_kept": resumed.KeysKept, "next_key": resumed.NextKey, "parked": len(session.Parked())}, nil
}

type adoptArgs struct {
	Of     string   `json:"of"`
	Carry  string   `json:"carry"`
	Tokens []uint32 `json:"tokens"`
}

func adopt(ctx context.Context, d *driver, args adoptArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	carry, err := find(d, d.carries, args.Carry)
	if err != nil {
		return nil, err
	}
	return nil, session.Adopt(ctx, carry, args.Tokens)
}
