//! One instruction of BPF (RFC 9669), as the kernel has it.

/// Low three bits of an opcode.
pub(super) mod class {
    pub const LD: u8 = 0;
    pub const LDX: u8 = 1;
    pub const ST: u8 = 2;
    pub const STX: u8 = 3;
    pub const ALU: u8 = 4;
    pub const JMP: u8 = 5;
    pub const JMP32: u8 = 6;
    pub const ALU64: u8 = 7;
}

pub(super) mod opcode {
    pub const LOAD_IMM64: u8 = 0x18;
    pub const STORE_IMM32: u8 = 0x62;
    pub const STORE32: u8 = 0x63;
    pub const STORE64: u8 = 0x7b;
    pub const ADD64_IMM: u8 = 0x07;
    pub const MOV64: u8 = 0xbf;
    pub const MOV64_IMM: u8 = 0xb7;
    pub const JUMP: u8 = 0x05;
    pub const JUMP32: u8 = 0x06;
    pub const JUMP_IF_ZERO: u8 = 0x15;
    pub const JUMP_IF_NOT_ZERO32: u8 = 0x56;
    pub const CALL: u8 = 0x85;
    pub const EXIT: u8 = 0x95;
}

/// What the source register of a call says.
pub(super) const CALL_HELPER: u8 = 0;
pub(super) const CALL_FUNCTION: u8 = 1;

/// And that of a load of 64 bits.
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
