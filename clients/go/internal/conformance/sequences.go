package main

import (
	"context"
	"strings"

	"example.com/specdraft/clients/go/specdraft"
)

type rowsArgs struct {
	Data  []byte `json:"data"`
	DType string `json:"dtype"`
	Width int    `json:"width"`
}

func (r rowsArgs) rows() specdraft.Rows { return specdraft.RawRows(r.Data, dtype(r.DType), r.Width) }

type openSequenceArgs struct {
	Of           string `json:"of"`
	As           string `json:"as"`
	BudgetTokens int    `json:"budget_tokens"`
	Reserve      bool   `json:"reserve"`
	Approximate  bool   `json:"approximate"`
}

func (a openSequenceArgs) policy() specdraft.RowsPolicy {
	if a.Approximate {
		return specdraft.RowsApproximate
	}
	return specdraft.RowsExact
}

func openSequence(ctx context.Context, d *driver, args openSequenceArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	options := specdraft.SequenceOptions{BudgetTokens: args.BudgetTokens, Reserve: args.Reserve, Rows: args.policy()}
	sequence, err := session.OpenSequence(ctx, options)
	if err != nil {
		return nil, err
	}
	keep(d, d.sequences, args.As, sequence)
	found, err := sequence.KnownState(ctx)
	return sayState(found), err
}

type pairsArgs struct {
	Of             string   `json:"of"`
	FirstKey       int64    `json:"first_key"`
	Tokens         []uint32 `json:"tokens"`
	Rows           rowsArgs `json:"rows"`
	AllowGap       bool     `json:"allow_gap"`
	AcceptedDrafts *int     `json:"accepted_drafts"`
	VerifiedTokens []uint32 `json:"verified_tokens"`
}

func (a pairsArgs) pairs() specdraft.Pairs {
	return specdraft.Pairs{
		FirstKey:       a.FirstKey,
		Tokens:         a.Tokens,
		Hiddens:        a.Rows.rows(),
		AllowGap:       a.AllowGap,
		AcceptedDrafts: a.AcceptedDrafts,
		VerifiedTokens: a.VerifiedTokens,
	}
}

type proposeArgs struct {
	pairsArgs
	Drafts     int      `json:"drafts"`
	MinLogprob *float32 `json:"min_logprob"`
	Mask       []uint32 `json:"mask"`
	Recommend  bool     `json:"recommend"`
	VerifyUs   *uint32  `json:"verify_us"`
}

func (a proposeArgs) draft() specdraft.Draft {
	return specdraft.Draft{
		Count:        a.Drafts,
		MinLogprob:   a.MinLogprob,
		Mask:         a.Mask,
		Recommend:    a.Recommend,
		VerifyMicros: a.VerifyUs,
	}
}

func prefill(ctx context.Context, d *driver, args pairsArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	found, err := sequence.Prefill(ctx, args.Tokens, args.Rows.rows())
	return sayState(found), err
}

func catchup(ctx context.Context, d *driver, args pairsArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	found, err := sequence.Catchup(ctx, args.pairs())
	return sayState(found), err
}

func propose(ctx context.Context, d *driver, args proposeArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	proposal, err := sequence.Propose(ctx, args.pairs(), args.draft())
	if err != nil {
		return nil, err
	}
	return sayProposal(proposal), nil
}

type batchArgs struct {
	Of    string        `json:"of"`
	Items []proposeArgs `json:"items"`
}

// one is the result of one item, said as an answer is.
type one struct {
	OK    any      `json:"ok,omitempty"`
	Error *failure `json:"error,omitempty"`
}

func catchupBatch(ctx context.Context, d *driver, args batchArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	var items []specdraft.CatchupItem
	for _, item := range args.Items {
		sequence, err := find(d, d.sequences, item.Of)
		if err != nil {
			return nil, err
		}
		items = append(items, specdraft.CatchupItem{Sequence: sequence, Pairs: item.pairs()})
	}
	results, err := session.CatchupBatch(ctx, items)
	said := make([]one, len(results))
	for index, result := range results {
		said[index].OK = sayState(result.State)
		if result.Err != nil {
			said[index] = one{Error: describe(result.Err)}
		}
	}
	return map[string]any{"results": said}, err
}

func proposeBatch(ctx context.Context, d *driver, args batchArgs) (any, error) {
	session, err := find(d, d.sessions, args.Of)
	if err != nil {
		return nil, err
	}
	var items []specdraft.ProposeItem
	for _, item := range args.Items {
		sequence, err := find(d, d.sequences, item.Of)
		if err != nil {
			return nil, err
		}
		items = append(items, specdraft.ProposeItem{Sequence: sequence, Pairs: item.pairs(), Draft: item.draft()})
	}
	results, err := session.ProposeBatch(ctx, items)
	said := make([]one, len(results))
	for index, result := range results {
		if result.Err != nil {
			said[index] = one{Error: describe(result.Err)}
			continue
		}
		said[index].OK = sayProposal(result.Proposal)
	}
	return map[string]any{"results": said}, err
}

type truncateArgs struct {
	Of             string `json:"of"`
	FirstKey       int64  `json:"first_key"`
	AcceptedDrafts *int   `json:"accepted_drafts"`
}

func (a truncateArgs) judgements() []specdraft.Judgement {
	if a.AcceptedDrafts == nil {
		return nil
	}
	return []specdraft.Judgement{specdraft.Accepted(*a.AcceptedDrafts)}
}

func truncate(ctx context.Context, d *driver, args truncateArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	found, err := sequence.Truncate(ctx, args.FirstKey, args.judgements()...)
	return sayState(found), err
}

func state(ctx context.Context, d *driver, args named) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	found, err := sequence.State(ctx)
	return sayState(found), err
}

type readDraftsArgs struct {
	Of        string `json:"of"`
	Op        uint64 `json:"op"`
	Embedding bool   `json:"with_last_embedding"`
}

func readDrafts(ctx context.Context, d *driver, args readDraftsArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	options := specdraft.ReadDraftsOptions{Op: args.Op, WithLastEmbedding: args.Embedding}
	stored, err := sequence.ReadDrafts(ctx, options)
	if err != nil {
		return nil, err
	}
	return map[string]any{
		"drafts":         numbers(stored.Drafts),
		"logprobs":       append([]float32{}, stored.Logprobs...),
		"stop_reason":    stopReason(stored.StopReason),
		"last_embedding": stored.LastEmbedding,
	}, nil
}

func closeSequence(ctx context.Context, d *driver, args truncateArgs) (any, error) {
	sequence, err := find(d, d.sequences, args.Of)
	if err != nil {
		return nil, err
	}
	_ = sequence.Close(ctx, args.judgements()...) // as the twin's, which never tells
	return nil, nil
}

type stateFacts struct {
	LastOp              uint64     `json:"last_op"`
	RowCount            int        `json:"row_count"`
	LastPairKey         int64      `json:"last_pair_key"`
	Ranges              [][2]int64 `json:"ranges"`
	FirstApproximateKey int64      `json:"first_approximate_key"`
}

func sayState(state specdraft.State) stateFacts {
	return stateFacts{state.LastOp, state.RowCount, state.LastPairKey, sayRanges(state.Ranges), state.FirstApproximateKey}
}

func sayRanges(ranges []specdraft.KeyRange) [][2]int64 {
	said := make([][2]int64, 0, len(ranges))
	for _, one := range ranges {
		said = append(said, [2]int64{one.Begin, one.End})
	}
	return said
}

func sayProposal(proposal *specdraft.Proposal) any {
	return map[string]any{
		"drafts":             numbers(proposal.Drafts),
		"logprobs":           append([]float32{}, proposal.Logprobs...),
		"stop_reason":        stopReason(proposal.StopReason),
		"state":              sayState(proposal.State),
		"recommended_drafts": proposal.RecommendedDrafts,
	}
}

// numbers is never null.
func numbers(values []uint32) []uint32 { return append([]uint32{}, values...) }

func stopReason(reason specdraft.StopReason) string {
	return strings.TrimPrefix(reason.String(), "STOP_REASON_")
}
