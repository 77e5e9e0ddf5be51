package specdraft

// Pairs are consecutive pairs of one sequence. Pair k joins the hidden state h_k with the token after it, t_{k+1}.
type Pairs struct {
	// FirstKey is the key f of the first pair; rows with keys >= f are dropped before the pairs are appended.
	FirstKey int64
	// Tokens[j] = t_{f+j+1}.
	Tokens []uint32
	// Hiddens has one row a token: row j = h_{f+j}.
	Hiddens Rows
	// AllowGap declares that keys between the stored rows and f will stay without rows.
	AllowGap bool
	// AcceptedDrafts is how many drafts of the last round the target accepted; nil = the service counts.
	AcceptedDrafts *int
	// VerifiedTokens, with RowsApproximate, are t_{P+1}.. of the keys from P up to f, where P = LastPairKey + 1. They must
	// equal the last drafts, whose rows then stay as approximate rows.
	VerifiedTokens []uint32
}

// Draft says how to draft after the pairs are written.
type Draft struct {
	// Count is K, the drafts wanted; 0 only writes.
	Count int
	// MinLogprob stops after the first draft whose log-probability is below it; nil = never.
	MinLogprob *float32
	// Mask is the grammar mask, [W] or [K, W] flattened, W = ceil(vocab_size / 32); empty = none.
	Mask []uint32
	// Recommend asks for Proposal.RecommendedDrafts.
	Recommend bool
	// VerifyMicros is how long the target's verify takes, in microseconds, for the recommendation; nil = the service
	// takes the time from its last answer to this request.
	VerifyMicros *uint32
}

// check refuses what does not make pairs.
func (p Pairs) check() error {
	if len(p.Tokens) != p.Hiddens.Len() || len(p.Tokens) == 0 {
		return argumentError("%d tokens and %d hidden rows do not make pairs", len(p.Tokens), p.Hiddens.Len())
	}
	if p.AcceptedDrafts != nil && *p.AcceptedDrafts < 0 {
		return argumentError("%d accepted drafts", *p.AcceptedDrafts)
	}
	return nil
}

// first is the first count pairs. The tokens are already those after each hidden, so a cut needs no care.
func (p Pairs) first(count int) Pairs {
	p.Tokens, p.Hiddens = p.Tokens[:count], p.Hiddens.Slice(0, count)
	return p
}

// after is what follows the first count pairs once they are written: no gap, nothing to judge or to verify.
func (p Pairs) after(count int) Pairs {
	return Pairs{
		FirstKey: p.FirstKey + int64(count),
		Tokens:   p.Tokens[count:],
		Hiddens:  p.Hiddens.Slice(count, p.Hiddens.Len()),
	}
}

// NextPairs turns the outcome of a verify into the pairs of the next round.
//
// The target had been fed position = P tokens, was then fed [t_P, d_1..d_K] in one forward, accepted the first accepted
// drafts and chose the bonus token itself. Hiddens are h_P.., with accepted + 1 rows or more.
//
// The second result is P' = P + accepted + 1: the tokens fed to the target that count.
func NextPairs(position int64, drafts []uint32, accepted int, bonus uint32, hiddens Rows) (Pairs, int64, error) {
	if accepted < 0 || accepted > len(drafts) {
		return Pairs{}, position, argumentError("%d accepted drafts of %d", accepted, len(drafts))
	}
	taken := accepted + 1
	if hiddens.Len() < taken {
		return Pairs{}, position, argumentError("%d hidden rows for %d pairs", hiddens.Len(), taken)
	}
	tokens := make([]uint32, 0, taken)
	tokens = append(append(tokens, drafts[:accepted]...), bonus)
	return Pairs{FirstKey: position, Tokens: tokens, Hiddens: hiddens.Slice(0, taken)}, position + int64(taken), nil
}

// promptPairs are the pairs of a prompt: prompt[1:] with all hiddens but the last, from key 0. A prompt of one token has
// none.
func promptPairs(prompt []uint32, hiddens Rows) (Pairs, error) {
	if len(prompt) == 0 || len(prompt) != hiddens.Len() {
		return Pairs{}, argumentError("a prompt of %d tokens needs as many hidden rows, not %d", len(prompt), hiddens.Len())
	}
	return Pairs{Tokens: prompt[1:], Hiddens: hiddens.Slice(0, hiddens.Len()-1)}, nil
}
