package specdraft

import (
	"encoding/binary"
	"math"
)

// Rows are hidden rows: Len() rows of Width elements, little-endian, row after row. The zero value has no rows.
//
// Float32Rows and BFloat16Rows copy; RawRows shares the bytes that it is given: leave those alone until the call that was
// given the rows has returned.
type Rows struct {
	data  []byte
	dtype DType
	width int
}

// Float32Rows are rows of float32 elements; len(values) is a multiple of width.
func Float32Rows(values []float32, width int) Rows {
	return Rows{float32Bytes(values), Float32, width}
}

// BFloat16Rows are rows of bfloat16 elements as raw bits; len(bits) is a multiple of width.
func BFloat16Rows(bits []uint16, width int) Rows {
	return Rows{uint16Bytes(bits), BFloat16, width}
}

// RawRows are rows as they travel: little-endian elements, row after row.
func RawRows(data []byte, dtype DType, width int) Rows {
	return Rows{data, dtype, width}
}

// Len is the number of whole rows.
func (r Rows) Len() int {
	if r.rowSize() == 0 {
		return 0
	}
	return len(r.data) / r.rowSize()
}

// Slice is the rows begin <= i < end, sharing the bytes. Like a slice expression, it panics outside of 0..Len().
func (r Rows) Slice(begin, end int) Rows {
	size := r.rowSize()
	return Rows{r.data[begin*size : end*size], r.dtype, r.width}
}

// Bytes are the elements as they travel, shared.
func (r Rows) Bytes() []byte { return r.data }

func (r Rows) rowSize() int { return r.width * elementSize(r.dtype) }

// check refuses rows that are not whole, or of another shape or type than the session's.
func (r Rows) check(dtype DType, width int) error {
	if r.dtype != dtype || r.width != width {
		return argumentError("hidden rows are %v [rows, %d]; this session takes %v [rows, %d]", r.dtype, r.width, dtype, width)
	}
	if size := r.rowSize(); size == 0 || len(r.data)%size != 0 {
		return argumentError("%d bytes are no whole rows of %d bytes", len(r.data), size)
	}
	return nil
}

func elementSize(dtype DType) int {
	switch dtype {
	case Float32:
		return 4
	case BFloat16:
		return 2
	}
	return 0
}

func float32Bytes(values []float32) []byte {
	data := make([]byte, 0, 4*len(values))
	for _, value := range values {
		data = binary.LittleEndian.AppendUint32(data, math.Float32bits(value))
	}
	return data
}

func uint16Bytes(values []uint16) []byte {
	data := make([]byte, 0, 2*len(values))
	for _, value := range values {
		data = binary.LittleEndian.AppendUint16(data, value)
	}
	return data
}

func uint32Bytes(values []uint32) []byte {
	data := make([]byte, 0, 4*len(values))
	for _, value := range values {
		data = binary.LittleEndian.AppendUint32(data, value)
	}
	return data
}
