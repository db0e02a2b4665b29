// Copies between pairs of strided boxes: packing and unpacking of messages, copies that stay on the device, margins.
// By words of as many bytes as all addresses and strides are multiples of.
#include "pieces.cuh"

template <class Word> struct Copy {
    DEVICE Word operator()(const Piece& piece, int64 source, const Word*) const {
        return reinterpret_cast<const Word*>(piece.source)[source];
    }
};

// `source` holds the pattern of 8 bytes; narrower words take its low bytes, which are the whole value.
template <class Word> struct Fill {
    DEVICE Word operator()(const Piece& piece, int64, const Word*) const { return Word(piece.source); }
};

struct alignas(16) Wide {
    uint64 low, high;
    Wide() = default;
    DEVICE explicit Wide(uint64 pattern) : low(pattern), high(pattern) {}
};

KERNEL(copy_1, BoxesParams) { each_word<uint8>(p, Copy<uint8>()); }
KERNEL(copy_2, BoxesParams) { each_word<uint16>(p, Copy<uint16>()); }
KERNEL(copy_4, BoxesParams) { each_word<uint32>(p, Copy<uint32>()); }
KERNEL(copy_8, BoxesParams) { each_word<uint64>(p, Copy<uint64>()); }
KERNEL(copy_16, BoxesParams) { each_word<Wide>(p, Copy<Wide>()); }
KERNEL(fill_1, BoxesParams) { each_word<uint8>(p, Fill<uint8>()); }
KERNEL(fill_2, BoxesParams) { each_word<uint16>(p, Fill<uint16>()); }
KERNEL(fill_4, BoxesParams) { each_word<uint32>(p, Fill<uint32>()); }
KERNEL(fill_8, BoxesParams) { each_word<uint64>(p, Fill<uint64>()); }
KERNEL(fill_16, BoxesParams) { each_word<Wide>(p, Fill<Wide>()); }
