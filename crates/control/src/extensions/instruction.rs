//! One BPF instruction (RFC 9669), as the kernel encodes it.

/// Low three bits of an opcode.
pub(super) mod class {
    pub(crate) const LD: u8 = 0;
    pub(crate) const LDX: u8 = 1;
    pub(crate) const ST: u8 = 2;
    pub(crate) const STX: u8 = 3;
    pub(crate) const ALU: u8 = 4;
    pub(crate) const JMP: u8 = 5;
    pub(crate) const JMP32: u8 = 6;
    pub(crate) const ALU64: u8 = 7;
}

pub(super) mod opcode {
    pub(crate) const LOAD_IMM64: u8 = 0x18;
    pub(crate) const STORE_IMM32: u8 = 0x62;
    pub(crate) const STORE32: u8 = 0x63;
    pub(crate) const STORE64: u8 = 0x7b;
    pub(crate) const ADD64_IMM: u8 = 0x07;
    pub(crate) const MOV64: u8 = 0xbf;
    pub(crate) const MOV64_IMM: u8 = 0xb7;
    pub(crate) const JUMP: u8 = 0x05;
    pub(crate) const JUMP32: u8 = 0x06;
    pub(crate) const JUMP_IF_ZERO: u8 = 0x15;
    pub(crate) const JUMP_IF_NOT_ZERO32: u8 = 0x56;
    pub(crate) const CALL: u8 = 0x85;
    pub(crate) const EXIT: u8 = 0x95;
}

/// Values of the source register of a call.
pub(super) const CALL_HELPER: u8 = 0;
pub(super) const CALL_FUNCTION: u8 = 1;

/// Values of the source register of a 64-bit load.
pub(super) const LOAD_MAP: u8 = 1;
pub(super) const LOAD_MAP_VALUE: u8 = 2;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instruction {
    pub opcode: u8,
    pub destination: u8,
    pub source: u8,
    pub offset: i16,
    pub immediate: i32,
}

impl Instruction {
    pub(super) fn class(self) -> u8 {
        self.opcode & 7
    }

    /// The upper half of the opcode of an operation or a jump.
    pub(super) fn operation(self) -> u8 {
        self.opcode & 0xf0
    }

    /// The upper three bits of the opcode of a load or a store.
    pub(super) fn mode(self) -> u8 {
        self.opcode & 0xe0
    }

    pub(super) fn is_load_imm64(self) -> bool {
        self.opcode == opcode::LOAD_IMM64
    }
}

impl From<u64> for Instruction {
    fn from(word: u64) -> Instruction {
        let [opcode, registers, o0, o1, i0, i1, i2, i3] = word.to_le_bytes();
        Instruction {
            opcode,
            destination: registers & 15,
            source: registers >> 4,
            offset: i16::from_le_bytes([o0, o1]),
            immediate: i32::from_le_bytes([i0, i1, i2, i3]),
        }
    }
}

impl From<Instruction> for u64 {
    fn from(instruction: Instruction) -> u64 {
        let [o0, o1] = instruction.offset.to_le_bytes();
        let [i0, i1, i2, i3] = instruction.immediate.to_le_bytes();
        let registers = instruction.source << 4 | instruction.destination & 15;
        u64::from_le_bytes([instruction.opcode, registers, o0, o1, i0, i1, i2, i3])
    }
}
