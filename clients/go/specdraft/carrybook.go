package specdraft

import (
	"slices"
	"sync"
)

// knownCarry is a carry with what its keys were made from: t_0.. of the sequence that it was taken from, as far as its
// keys depend on them. The carry's label is the conversation.
type knownCarry struct {
	carry  Carry
	tokens []uint32
}

// makeKnown keeps the tokens that matter: the last layer's row of key k depends on t_0 .. t_{k + layerCount}.
func makeKnown(carry Carry, tokens []uint32, layerCount int) knownCarry {
	count := min(int64(len(tokens)), carry.LastKey()+1+int64(layerCount))
	return knownCarry{carry, slices.Clone(tokens[:count])}
}

// keysBelow is the number of its keys that lie below a bound.
func (k knownCarry) keysBelow(bound int64) int64 {
	var count int64
	for _, one := range k.carry.Ranges {
		count += max(0, min(one.End, bound)-one.Begin)
	}
	return count
}

// wanted is what a sequence to be resumed looks like.
type wanted struct {
	tokens       []uint32
	conversation string
	layerCount   int
	pageRows     int
	keepCarry    bool
}

// claim is a carry that was chosen, and is in nobody else's reach until it is put back.
type claim struct {
	known         knownCarry
	keepKeysBelow int64 // c - L, for c common tokens
	keys          int64 // of it that are used
	isShared      bool  // the carry has to stay: other turns would miss what this one drops
}

// weigh says what could be used of a carry. One that would lose keys moves only within its own conversation, where what
// follows the common prefix has been overtaken. Anywhere else it is a prefix that two conversations have in common, and
// both go on.
func weigh(known knownCarry, want wanted) claim {
	keep := int64(commonPrefix(known.tokens, want.tokens) - want.layerCount)
	keys := known.keysBelow(keep)
	losesKeys := keys < known.keysBelow(known.carry.LastKey()+1)
	isOwn := want.conversation != "" && known.carry.Label == want.conversation
	return claim{known, keep, keys, want.keepCarry || (losesKeys && !isOwn)}
}

func commonPrefix(left, right []uint32) int {
	count := min(len(left), len(right))
	for index := range count {
		if left[index] != right[index] {
			return index
		}
	}
	return count
}

// carryBook holds the known carries, the longest unused first, within bounds.
type carryBook struct {
	carriesMax, tokensMax int

	mu     sync.Mutex
	known  []knownCarry
	tokens int
}

func newCarryBook(carriesMax, tokensMax int) *carryBook {
	return &carryBook{carriesMax: carriesMax, tokensMax: tokensMax}
}

// carries are those that are known, the longest unused first.
func (b *carryBook) carries() []Carry {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]Carry, len(b.known))
	for index, one := range b.known {
		all[index] = one.carry
	}
	return all
}

// add remembers a carry as the youngest. It returns those that had to be forgotten for it: nobody will ask for them again.
// A carry without keys, and one with more tokens than the book holds, is itself among them.
func (b *carryBook) add(known knownCarry) []Carry {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(known.carry.ID)
	if len(known.tokens) > b.tokensMax || b.carriesMax == 0 || known.carry.LastKey() < 0 {
		return []Carry{known.carry}
	}
	b.known = append(b.known, known)
	b.tokens += len(known.tokens)
	var forgotten []Carry
	for len(b.known) > b.carriesMax || b.tokens > b.tokensMax {
		forgotten = append(forgotten, b.known[0].carry)
		b.remove(b.known[0].carry.ID)
	}
	return forgotten
}

// claim takes the carry with the most usable keys out of the book; false if no carry has any. Of equally good ones: the
// conversation's own, then the one that loses the fewest keys, then the youngest.
func (b *carryBook) claim(want wanted) (claim, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var best *claim
	for _, known := range b.known {
		one := weigh(known, want)
		// Whole pages are shared, a part of one is copied: below a page there is nothing to win by sharing.
		least := int64(1)
		if one.isShared {
			least = max(1, int64(want.pageRows))
		}
		if one.keys >= least && (best == nil || !best.isBetter(one, want.conversation)) {
			best = &one
		}
	}
	if best == nil {
		return claim{}, false
	}
	b.remove(best.known.carry.ID)
	return *best, true
}

// isBetter says whether a claim beats another, younger one.
func (c claim) isBetter(other claim, conversation string) bool {
	if c.keys != other.keys {
		return c.keys > other.keys
	}
	if ours, theirs := c.known.carry.Label == conversation, other.known.carry.Label == conversation; ours != theirs {
		return ours
	}
	return c.known.keysBelow(c.known.carry.LastKey()+1) < other.known.keysBelow(other.known.carry.LastKey()+1)
}

func (b *carryBook) forget(id []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.remove(id)
}

func (b *carryBook) remove(id []byte) {
	index := slices.IndexFunc(b.known, func(one knownCarry) bool { return string(one.carry.ID) == string(id) })
	if index < 0 {
		return
	}
	b.tokens -= len(b.known[index].tokens)
	b.known = slices.Delete(b.known, index, index+1)
}
