//! Admission: whether code refers only to what its protection domain contains. The kernel's
//! verifier checks the rest: that every access is within bounds and that every run terminates.

use std::collections::HashSet;

use portolan_proto::extension::{Code, MapDefinition, MapKind};

use super::Domain;
use super::instruction::{CALL_FUNCTION, CALL_HELPER, Instruction, class, opcode};

/// Why code is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("there are no instructions")]
    Empty,
    #[error("{0} instructions are too many; a handler may have {1}")]
    TooLong(usize, usize),
    #[error("the handler or the predicate is not within the code")]
    Entry,
    #[error("instruction {0}: opcode {1:#04x} is not one that extensions may use")]
    Opcode(usize, u8),
    #[error("instruction {0}: registers of this number do not exist")]
    Register(usize),
    #[error("instruction {0}: jumps or calls out of the code")]
    Target(usize),
    #[error("instruction {0}: helper {1} is not in the protection domain")]
    Helper(usize, i32),
    #[error("instruction {0}: calls a function of the kernel")]
    KernelFunction(usize),
    #[error(
        "instruction {0}: names something by a number; only the extension's own maps can be named"
    )]
    Foreign(usize),
    #[error("relocation {0} does not lead from a load to one of the maps")]
    Relocation(usize),
    #[error("{0} maps are too many; a handler may have {1}")]
    TooManyMaps(usize, usize),
    #[error("map {0:?}: {1}")]
    Map(String, String),
    #[error("the maps take {0} bytes; a handler may have {1}")]
    Memory(u64, u64),
}

/// Checks code. Returns how many bytes its maps take.
pub fn check(code: &Code, domain: &Domain) -> Result<u64, Fault> {
    let length = code.instructions.len();
    if length == 0 {
        return Err(Fault::Empty);
    }
    if length > domain.instructions {
        return Err(Fault::TooLong(length, domain.instructions));
    }
    let entries = [Some(code.handler), code.predicate];
    if entries
        .into_iter()
        .flatten()
        .any(|at| at as usize >= length)
    {
        return Err(Fault::Entry);
    }
    let memory = check_maps(&code.maps, domain)?;
    check_instructions(&code.instructions, domain)?;
    check_relocations(code)?;
    Ok(memory)
}

fn check_instructions(words: &[u64], domain: &Domain) -> Result<(), Fault> {
    let mut at = 0;
    while let Some(&word) = words.get(at) {
        let instruction = Instruction::from(word);
        check_one(at, instruction, words.len(), domain)?;
        at += 1;
        if instruction.is_load_imm64() {
            check_second_half(at, words)?;
            at += 1;
        }
    }
    Ok(())
}

fn check_one(
    at: usize,
    instruction: Instruction,
    length: usize,
    domain: &Domain,
) -> Result<(), Fault> {
    if instruction.destination > 10 || instruction.source > 10 {
        return Err(Fault::Register(at));
    }
    let unknown = Err(Fault::Opcode(at, instruction.opcode));
    match instruction.class() {
        class::LD if instruction.is_load_imm64() && instruction.source != 0 => {
            Err(Fault::Foreign(at))
        }
        class::LD if instruction.is_load_imm64() => Ok(()),
        class::LDX | class::ST if is_plain_access(instruction) => Ok(()),
        class::STX if is_plain_access(instruction) || is_atomic(instruction) => Ok(()),
        class::ALU | class::ALU64 if instruction.operation() <= 0xd0 => Ok(()),
        class::JMP | class::JMP32 => check_jump(at, instruction, length, domain),
        _ => unknown,
    }
}

/// Whether this is a plain memory access of one to eight bytes; `LDX` may also sign-extend.
fn is_plain_access(instruction: Instruction) -> bool {
    const MEM: u8 = 0x60;
    const MEM_SIGNED: u8 = 0x80;
    instruction.mode() == MEM
        || instruction.mode() == MEM_SIGNED && instruction.class() == class::LDX
}

/// Whether this is an atomic add, and, or, xor, exchange or compare-and-exchange, with or without
/// fetch, of 32 or 64 bits.
fn is_atomic(instruction: Instruction) -> bool {
    const FETCH: i32 = 1;
    const XCHG: i32 = 0xe1;
    const CMPXCHG: i32 = 0xf1;
    let operation = instruction.immediate;
    matches!(instruction.opcode, 0xc3 | 0xdb)
        && (matches!(operation & !FETCH, 0x00 | 0x40 | 0x50 | 0xa0)
            || matches!(operation, XCHG | CMPXCHG))
}

fn check_jump(
    at: usize,
    instruction: Instruction,
    length: usize,
    domain: &Domain,
) -> Result<(), Fault> {
    match instruction.opcode {
        opcode::EXIT => Ok(()),
        opcode::CALL => check_call(at, instruction, length, domain),
        opcode::JUMP32 => check_target(at, instruction.immediate, length),
        opcode::JUMP => check_target(at, instruction.offset.into(), length),
        // Signed and unsigned comparisons; not calls by register, nor opcodes that the kernel rewrites.
        _ if matches!(instruction.operation(), 0x10..=0x70 | 0xa0..=0xd0) => {
            check_target(at, instruction.offset.into(), length)
        }
        other => Err(Fault::Opcode(at, other)),
    }
}

fn check_call(
    at: usize,
    instruction: Instruction,
    length: usize,
    domain: &Domain,
) -> Result<(), Fault> {
    let target = instruction.immediate;
    match instruction.source {
        CALL_HELPER
            if domain
                .helpers
                .iter()
                .any(|&helper| i64::from(helper) == target.into()) =>
        {
            Ok(())
        }
        CALL_HELPER => Err(Fault::Helper(at, target)),
        CALL_FUNCTION => check_target(at, target, length),
        _ => Err(Fault::KernelFunction(at)),
    }
}

fn check_target(at: usize, distance: i32, length: usize) -> Result<(), Fault> {
    // Code is far shorter than 2^31 instructions.
    let target = at as i64 + 1 + i64::from(distance);
    match usize::try_from(target) {
        Ok(target) if target < length => Ok(()),
        _ => Err(Fault::Target(at)),
    }
}

fn check_second_half(at: usize, words: &[u64]) -> Result<(), Fault> {
    let second = words.get(at).map(|&word| Instruction::from(word));
    let is_sound = second.is_some_and(|second| {
        second
            == Instruction {
                immediate: second.immediate,
                ..Instruction::default()
            }
    });
    if is_sound {
        Ok(())
    } else {
        Err(Fault::Opcode(at, second.unwrap_or_default().opcode))
    }
}

/// Each relocation refers to a load that no other relocation uses; the address of a value refers to
/// entry 0 of an array.
fn check_relocations(code: &Code) -> Result<(), Fault> {
    let loads = loads(&code.instructions);
    let mut seen = HashSet::new();
    for (index, relocation) in code.relocations.iter().enumerate() {
        let at = relocation.instruction as usize;
        let map = code.maps.get(usize::from(relocation.map));
        let leads_to = match (map, relocation.offset) {
            (Some(_), None) => true,
            (Some(map), Some(offset)) => map.kind == MapKind::Array && offset < map.value,
            (None, _) => false,
        };
        if !loads.contains(&at) || !leads_to || !seen.insert(at) {
            return Err(Fault::Relocation(index));
        }
    }
    Ok(())
}

/// Returns the indices at which 64-bit loads begin.
fn loads(words: &[u64]) -> HashSet<usize> {
    let mut found = HashSet::new();
    let mut at = 0;
    while let Some(&word) = words.get(at) {
        if Instruction::from(word).is_load_imm64() {
            found.insert(at);
            at += 1;
        }
        at += 1;
    }
    found
}

fn check_maps(maps: &[MapDefinition], domain: &Domain) -> Result<u64, Fault> {
    if maps.len() > domain.maps {
        return Err(Fault::TooManyMaps(maps.len(), domain.maps));
    }
    let mut memory = 0;
    for map in maps {
        memory += check_map(map, domain)
            .map_err(|why| Fault::Map(map.name.chars().take(32).collect(), why))?;
    }
    if memory > domain.memory {
        Err(Fault::Memory(memory, domain.memory))
    } else {
        Ok(memory)
    }
}

/// Checks a map. Returns how many bytes it takes.
fn check_map(map: &MapDefinition, domain: &Domain) -> Result<u64, String> {
    /// Per-entry overhead of a hash in the kernel.
    const ENTRY: u64 = 64;
    let (key, value, entries) = (
        u64::from(map.key),
        u64::from(map.value),
        u64::from(map.entries),
    );
    if map.kind == MapKind::Ring {
        let is_sound = map.entries.is_power_of_two() && (4096..=1 << 20).contains(&map.entries);
        return if is_sound && map.contents.is_empty() && map.key == 0 && map.value == 0 {
            Ok(entries)
        } else {
            Err("a ring has a power of two of bytes, from 4096 to 1048576".to_owned())
        };
    }
    if !(1..=domain.entries).contains(&map.entries) {
        return Err(format!("there can be 1 to {} entries", domain.entries));
    }
    if !(1..=domain.key).contains(&map.key) || !(1..=domain.value).contains(&map.value) {
        return Err(format!(
            "a key has 1 to {} bytes, a value 1 to {}",
            domain.key, domain.value
        ));
    }
    let is_array = matches!(map.kind, MapKind::Array | MapKind::PerCpuArray);
    if is_array && map.key != 4 {
        return Err("the key of an array has four bytes".to_owned());
    }
    let has_contents = !map.contents.is_empty() || map.is_constant;
    let is_initial = map.kind == MapKind::Array && map.contents.len() <= map.value as usize;
    if has_contents && !is_initial {
        return Err("only the first entry of an array has contents from the start".to_owned());
    }
    Ok(match map.kind {
        MapKind::PerCpuArray => entries * value.next_multiple_of(8) * u64::from(domain.processors),
        MapKind::Array => (entries * value.next_multiple_of(8)).next_multiple_of(4096),
        _ => entries * (key.next_multiple_of(8) + value.next_multiple_of(8) + ENTRY),
    })
}
