package specdraft

import (
	"bytes"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const (
	// tokenSize is the longest varint of a token id.
	tokenSize = 5
	// messageMargin is room for the ids, numbers and tags of one entry and of the frame around it; a mask is extra.
	messageMargin = 1024
	maskWordSize  = 4
)

// placement copies hidden rows to where the service reads them. A place belongs to one request, and to nobody else until
// the service is known to be done with it.
type placement struct {
	arena *arena // nil = inline
	// maskWords are the words of one mask row, where the arena has room for masks; 0 = it has none.
	maskWords int
	maxDrafts int
	// inlineRowsMax is the most rows of one request that travel inside the message.
	inlineRowsMax int
}

// placed is rows that lie somewhere: how the request names them, how many they are, what they and their tokens add to the
// message, and how to give the place back.
type placed struct {
	ref         *pb.TensorRef
	rows        int
	messageSize int
	slot        *uint32
	mask        *pb.GrammarMask
	release     func()
}

// place puts the rows into a slot, else into the staging area, else (as many as a message takes) into the message.
func (p *placement) place(rows Rows) (placed, error) {
	if p.arena != nil && rows.Len() > 0 {
		if rows.Len() <= p.arena.slotRows {
			if slot, ok := p.arena.takeSlot(); ok {
				return p.inSlot(slot, rows)
			}
		}
		if first, ok := p.arena.claimStaging(rows.Len()); ok {
			return p.inStaging(first, rows)
		}
	}
	kept := rows.Slice(0, min(rows.Len(), p.inlineRowsMax))
	ref := reference(kept)
	// A copy: the caller may have gone on with its rows when a request that it gave up is sent again.
	ref.Memory = &pb.TensorRef_Inline{Inline: bytes.Clone(kept.data)}
	size := messageMargin + len(kept.data) + tokenSize*kept.Len()
	return placed{ref: ref, rows: kept.Len(), messageSize: size, release: func() {}}, nil
}

func (p *placement) inSlot(slot uint32, rows Rows) (placed, error) {
	release := func() { p.arena.giveSlot(slot) }
	if err := p.arena.writeSlot(slot, rows); err != nil {
		release()
		return placed{}, arenaError(err)
	}
	ref := reference(rows)
	ref.Memory = &pb.TensorRef_ArenaSlot{ArenaSlot: &pb.ArenaSlot{Slot: slot}}
	return placed{ref: ref, rows: rows.Len(), messageSize: messageSize(rows), slot: &slot, release: release}, nil
}

func (p *placement) inStaging(first uint32, rows Rows) (placed, error) {
	if err := p.arena.writeStaging(first, rows); err != nil {
		p.arena.endStaging()
		return placed{}, arenaError(err)
	}
	ref := reference(rows)
	ref.Memory = &pb.TensorRef_ArenaStaging{ArenaStaging: &pb.ArenaStaging{FirstRow: first}}
	return placed{ref: ref, rows: rows.Len(), messageSize: messageSize(rows), release: p.arena.endStaging}, nil
}

// placeMask puts a mask beside rows that lie in a slot, if the session has room for masks there; else into the message.
// A mask of another size goes into the message: the service says what is wrong.
func (p *placement) placeMask(one *placed, words []uint32) error {
	rows := 0
	if p.maskWords > 0 && len(words)%p.maskWords == 0 {
		rows = len(words) / p.maskWords
	}
	if one.slot == nil || rows < 1 || rows > p.maxDrafts {
		one.mask = &pb.GrammarMask{Words: append([]uint32(nil), words...)}
		one.messageSize += maskWordSize * len(words)
		return nil
	}
	if err := p.arena.writeMask(*one.slot, words); err != nil {
		return arenaError(err)
	}
	one.mask = &pb.GrammarMask{ArenaSlot: one.slot, ArenaRowCount: uint32(rows)}
	return nil
}

func reference(rows Rows) *pb.TensorRef {
	return &pb.TensorRef{Dtype: rows.dtype, RowCount: uint32(rows.Len())}
}

func messageSize(rows Rows) int { return messageMargin + tokenSize*rows.Len() }
