//! Converts the object file that clang made to the code that is sent to the server: the functions reachable
//! from the handler and the predicate, one after the other; the maps that they name; and the relocations. A
//! hostile file harms only the process that reads it; the server validates everything again.

use std::collections::HashMap;

use object::read::elf::ElfFile64;
use object::{
    Endianness, Object as _, ObjectSection as _, ObjectSymbol as _, RelocationFlags,
    RelocationTarget, SectionIndex, SymbolIndex, SymbolKind,
};
use portolan_proto::extension::{Code, Direction, MapDefinition, MapKind, Relocation};

const HANDLER: &str = "portolan/handler";
const SEND_HANDLER: &str = "portolan/send";
const PREDICATE: &str = "portolan/predicate";
const MAPS: &str = "portolan/maps";

/// Bytes of an instruction, and of a map's declaration.
const INSTRUCTION: u64 = 8;
const DECLARATION: u64 = 16;

const LOAD_IMM64: u8 = 0x18;
const CALL: u8 = 0x85;
const CALL_FUNCTION: u8 = 1;

/// Above the server's limit.
const LONGEST: u64 = 1 << 20;

/// The reason why an object file is not an extension.
#[derive(Debug, thiserror::Error)]
pub enum ObjectError {
    #[error("not an object file of ELF: {0}")]
    Elf(#[from] object::Error),
    #[error("not compiled for BPF: use clang -target bpf")]
    NotBpf,
    #[error("no function is a PORTOLAN_HANDLER or a PORTOLAN_SEND_HANDLER")]
    NoHandler,
    #[error("more than one function is a {0}")]
    Several(&'static str),
    #[error("the file refers to {0:?}, which is neither its own nor one of the SDK's functions")]
    Undefined(String),
    #[error("{0:?} is declared as no map is")]
    Map(String),
    #[error("the file is inconsistent: {0}")]
    Inconsistent(&'static str),
    #[error("the file is too large")]
    TooLarge,
}

type Elf<'a> = ElfFile64<'a, Endianness>;

/// Reads an object file.
pub(super) fn parse(bytes: &[u8]) -> Result<Code, ObjectError> {
    let elf = Elf::parse(bytes)?;
    if elf.architecture() != object::Architecture::Bpf || !elf.is_little_endian() {
        return Err(ObjectError::NotBpf);
    }
    let (handler, direction) = handler_of(&elf)?;
    let predicate = only_function(&elf, PREDICATE, "PORTOLAN_PREDICATE")?;
    let mut assembly = Assembly::new(&elf);
    let handler = assembly.place(handler)?;
    let predicate = predicate
        .map(|function| assembly.place(function))
        .transpose()?;
    let code = assembly.finish(handler, predicate)?;
    Ok(Code { direction, ..code })
}

/// Returns the only handler, and its direction.
fn handler_of(elf: &Elf<'_>) -> Result<(Function, Direction), ObjectError> {
    let received = only_function(elf, HANDLER, "PORTOLAN_HANDLER")?;
    let sent = only_function(elf, SEND_HANDLER, "PORTOLAN_SEND_HANDLER")?;
    match (received, sent) {
        (Some(handler), None) => Ok((handler, Direction::Receive)),
        (None, Some(handler)) => Ok((handler, Direction::Send)),
        (None, None) => Err(ObjectError::NoHandler),
        (Some(_), Some(_)) => Err(ObjectError::Several("handler")),
    }
}

/// A function of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Function {
    section: SectionIndex,
    /// In bytes.
    start: u64,
    size: u64,
}

fn only_function(
    elf: &Elf<'_>,
    section: &str,
    what: &'static str,
) -> Result<Option<Function>, ObjectError> {
    let Some(section) = elf.section_by_name(section) else {
        return Ok(None);
    };
    let mut functions = functions_in(elf, section.index());
    let first = functions.next();
    match functions.next() {
        Some(_) => Err(ObjectError::Several(what)),
        None => Ok(first),
    }
}

fn functions_in<'a>(
    elf: &'a Elf<'_>,
    section: SectionIndex,
) -> impl Iterator<Item = Function> + 'a {
    let in_section = move |symbol: &object::read::elf::ElfSymbol64<'_, '_, Endianness>| {
        symbol.kind() == SymbolKind::Text && symbol.section_index() == Some(section)
    };
    elf.symbols()
        .filter(in_section)
        .map(move |symbol| Function {
            section,
            start: symbol.address(),
            size: symbol.size(),
        })
}

/// The code during its assembly.
struct Assembly<'a> {
    elf: &'a Elf<'a>,
    instructions: Vec<u64>,
    placed: HashMap<Function, u32>,
    maps: Vec<MapDefinition>,
    /// Maps by declaration: a section, and an offset, which is 0 for sections of variables.
    known: HashMap<(SectionIndex, u64), u16>,
    relocations: Vec<Relocation>,
    /// Calls to functions that are not placed yet.
    calls: Vec<(usize, Function)>,
}

impl<'a> Assembly<'a> {
    fn new(elf: &'a Elf<'a>) -> Assembly<'a> {
        Assembly {
            elf,
            instructions: Vec::new(),
            placed: HashMap::new(),
            maps: Vec::new(),
            known: HashMap::new(),
            relocations: Vec::new(),
            calls: Vec::new(),
        }
    }

    /// Adds a function, unless it is present already. Returns the index of its first instruction.
    fn place(&mut self, function: Function) -> Result<u32, ObjectError> {
        if let Some(&at) = self.placed.get(&function) {
            return Ok(at);
        }
        let section = self.elf.section_by_index(function.section)?;
        let code = section.data()?;
        let is_whole = [function.start, function.size]
            .iter()
            .all(|n| n.is_multiple_of(INSTRUCTION));
        let end = function.start.saturating_add(function.size);
        if !is_whole || function.size == 0 || function.size > LONGEST {
            return Err(ObjectError::Inconsistent(
                "a function has no whole instructions",
            ));
        }
        let code = usize::try_from(function.start)
            .ok()
            .zip(usize::try_from(end).ok())
            .and_then(|(start, end)| code.get(start..end))
            .ok_or(ObjectError::Inconsistent(
                "a function lies outside its section",
            ))?;
        let first = self.instructions.len();
        if first as u64 * INSTRUCTION > LONGEST {
            return Err(ObjectError::TooLarge);
        }
        // Below LONGEST.
        self.placed.insert(function, first as u32);
        let words = code.chunks_exact(INSTRUCTION as usize);
        self.instructions
            .extend(words.map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes"))));
        self.relocate(function, first)?;
        Ok(first as u32)
    }

    /// Resolves the references of a function that was placed at `first`.
    fn relocate(&mut self, function: Function, first: usize) -> Result<(), ObjectError> {
        let section = self.elf.section_by_index(function.section)?;
        let mut resolved = Vec::new();
        for (offset, relocation) in section.relocations() {
            let Some(within) = offset.checked_sub(function.start) else {
                continue;
            };
            if within >= function.size {
                continue;
            }
            if !matches!(relocation.flags(), RelocationFlags::Elf { .. }) {
                return Err(ObjectError::Inconsistent("a relocation of no kind"));
            }
            let RelocationTarget::Symbol(symbol) = relocation.target() else {
                return Err(ObjectError::Inconsistent("a relocation without a symbol"));
            };
            let at = first + (within / INSTRUCTION) as usize;
            self.resolve(at, symbol)?;
            resolved.push(at);
        }
        let end = self.instructions.len();
        for at in first..end {
            if is_call(self.instructions[at]) && !resolved.contains(&at) {
                self.note_call_within(function, first, at)?;
            }
        }
        Ok(())
    }

    fn resolve(&mut self, at: usize, symbol: SymbolIndex) -> Result<(), ObjectError> {
        let symbol = self.elf.symbol_by_index(symbol)?;
        let name = symbol.name().unwrap_or_default();
        let Some(section) = symbol.section_index() else {
            return Err(ObjectError::Undefined(name.to_owned()));
        };
        let word = self.instructions[at];
        if is_call(word) {
            let distance = i64::from(immediate(word)) + 1;
            let start = symbol.address() as i64 + distance * INSTRUCTION as i64;
            return self.note_call(at, section, start);
        }
        if opcode(word) != LOAD_IMM64 {
            return Err(ObjectError::Inconsistent(
                "a relocation of no load and no call",
            ));
        }
        let addend = u64::from(immediate(word).cast_unsigned());
        let offset = symbol.address().saturating_add(addend);
        let relocation = self.find_map(at, section, name, offset)?;
        // The relocation contains the addend that the compiler left there.
        self.instructions[at] &= 0xffff_ffff;
        self.relocations.push(relocation);
        Ok(())
    }

    fn note_call_within(
        &mut self,
        function: Function,
        first: usize,
        at: usize,
    ) -> Result<(), ObjectError> {
        let distance = (at - first) as i64 + 1 + i64::from(immediate(self.instructions[at]));
        let start = function.start as i64 + distance * INSTRUCTION as i64;
        self.note_call(at, function.section, start)
    }

    fn note_call(
        &mut self,
        at: usize,
        section: SectionIndex,
        start: i64,
    ) -> Result<(), ObjectError> {
        let called = functions_in(self.elf, section)
            .find(|function| i64::try_from(function.start) == Ok(start))
            .ok_or(ObjectError::Inconsistent(
                "a call that leads to no function",
            ))?;
        self.calls.push((at, called));
        Ok(())
    }

    /// Returns the map that a load refers to: a declared one, or the one of a section of variables.
    fn find_map(
        &mut self,
        at: usize,
        section: SectionIndex,
        symbol: &str,
        offset: u64,
    ) -> Result<Relocation, ObjectError> {
        let is_declared = self.elf.section_by_index(section)?.name()? == MAPS;
        let key = (section, if is_declared { offset } else { 0 });
        let map = match self.known.get(&key) {
            Some(&map) => map,
            None => {
                let definition = if is_declared {
                    self.declared(section, symbol, offset)?
                } else {
                    self.variables(section)?
                };
                let map = u16::try_from(self.maps.len()).map_err(|_| ObjectError::TooLarge)?;
                self.maps.push(definition);
                self.known.insert(key, map);
                map
            }
        };
        let offset = u32::try_from(offset).map_err(|_| ObjectError::TooLarge)?;
        Ok(Relocation {
            instruction: at as u32,
            map,
            offset: (!is_declared).then_some(offset),
        })
    }

    fn declared(
        &self,
        section: SectionIndex,
        symbol: &str,
        offset: u64,
    ) -> Result<MapDefinition, ObjectError> {
        let name = self.map_name(section, symbol, offset);
        let wrong = || ObjectError::Map(name.clone());
        let section = self.elf.section_by_index(section)?;
        let declaration = section.data_range(section.address() + offset, DECLARATION)?;
        let declaration: [u8; 16] = declaration
            .ok_or_else(wrong)?
            .try_into()
            .map_err(|_| wrong())?;
        let number = |at: usize| {
            let bytes = [0, 1, 2, 3].map(|byte| declaration[at + byte]);
            u32::from_le_bytes(bytes)
        };
        Ok(MapDefinition {
            kind: MapKind::from_number(number(0)).ok_or_else(wrong)?,
            key: number(4),
            value: number(8),
            entries: number(12),
            contents: Vec::new(),
            is_constant: false,
            name,
        })
    }

    fn map_name(&self, section: SectionIndex, symbol: &str, offset: u64) -> String {
        let here = |candidate: &object::read::elf::ElfSymbol64<'_, '_, Endianness>| {
            candidate.section_index() == Some(section)
                && candidate.address() == offset
                && candidate.kind() == SymbolKind::Data
        };
        let found = self.elf.symbols().find(here);
        let name = found.and_then(|found| found.name().ok());
        name.unwrap_or(symbol).to_owned()
    }

    fn variables(&self, section: SectionIndex) -> Result<MapDefinition, ObjectError> {
        let section = self.elf.section_by_index(section)?;
        let name = section.name()?.to_owned();
        let size = section.size();
        if size == 0 || size > LONGEST {
            return Err(ObjectError::TooLarge);
        }
        let is_variables = [".data", ".bss", ".rodata"]
            .iter()
            .any(|kind| name.starts_with(kind));
        if !is_variables {
            return Err(ObjectError::Undefined(name));
        }
        Ok(MapDefinition {
            is_constant: name.starts_with(".rodata"),
            name,
            kind: MapKind::Array,
            key: 4,
            value: size as u32,
            entries: 1,
            // Empty for .bss.
            contents: section.data()?.to_vec(),
        })
    }

    /// Places all called functions, and sets the calls' targets.
    fn finish(mut self, handler: u32, predicate: Option<u32>) -> Result<Code, ObjectError> {
        let mut next = 0;
        while let Some(&(at, function)) = self.calls.get(next) {
            next += 1;
            let target = self.place(function)?;
            // Both are below LONGEST.
            let distance = target as i64 - at as i64 - 1;
            let low = self.instructions[at] & 0xffff_ffff;
            self.instructions[at] = low | u64::from((distance as i32).cast_unsigned()) << 32;
        }
        Ok(Code {
            direction: Direction::default(),
            instructions: self.instructions,
            handler,
            predicate,
            maps: self.maps,
            relocations: self.relocations,
        })
    }
}

fn opcode(word: u64) -> u8 {
    word.to_le_bytes()[0]
}

fn immediate(word: u64) -> i32 {
    ((word >> 32) as u32).cast_signed()
}

fn is_call(word: u64) -> bool {
    opcode(word) == CALL && word.to_le_bytes()[1] >> 4 == CALL_FUNCTION
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_file_makes_the_reader_panic() {
        portolan_fuzz::check!(2000).for_each(|bytes| {
            let _ = parse(bytes);
            // As similar to a BPF object as possible.
            let mut like = [0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
            like.extend([1, 0, 247, 0, 1, 0, 0, 0]);
            like.extend(bytes);
            let _ = parse(&like);
        });
    }
}
