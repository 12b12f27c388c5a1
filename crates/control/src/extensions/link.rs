//! From admitted code to a program of the packet filter. A stub of ours goes around the handler and
//! alone has access to the packet: it calls the predicate and the handler as functions, with the
//! address of the view as the only argument, records their decision and its time, and tail-calls the
//! manager that applies it.

use portolan_proto::extension::layout::{
    MANAGER_APPLY, MANAGER_APPLY_SENT, RUN_ENDED, RUN_IS_SKIPPED, RUN_VERDICT,
};
use portolan_proto::extension::{Code, Direction, Relocation};

use super::instruction::{
    CALL_FUNCTION, CALL_HELPER, Instruction, LOAD_MAP, LOAD_MAP_VALUE, opcode,
};

/// Descriptors of the managers' maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Environment {
    pub work: i32,
    pub views: i32,
    /// Views of sent packets.
    pub sendings: i32,
    pub managers: i32,
}

const MAP_LOOKUP: i32 = 1;
const TIME: i32 = 5;
const TAIL_CALL: i32 = 12;

/// The program's result if a map or a manager is missing, which does not happen.
const TC_ACT_SHOT: i32 = 2;

const FRAME: u8 = 10;
/// Registers that the stub keeps across calls.
const PACKET: u8 = 6;
const WORK: u8 = 7;
const VIEW: u8 = 8;

/// Links code that [`super::check`] has admitted; `maps` are the descriptors of its maps.
pub fn link(code: &Code, maps: &[i32], environment: &Environment) -> Vec<u64> {
    let mut stub = Stub::default();
    stub.enter(environment, code.direction);
    if code.predicate.is_some() {
        stub.ask_predicate();
    }
    stub.run_handler();
    stub.go_on(environment, code.direction);
    let mut program = stub.finish(code);
    let start = program.len();
    program.extend(&code.instructions);
    for relocation in &code.relocations {
        relocate(&mut program[start..], relocation, maps);
    }
    program
}

fn relocate(code: &mut [u64], relocation: &Relocation, maps: &[i32]) {
    let at = relocation.instruction as usize;
    let load = Instruction {
        source: match relocation.offset {
            Some(_) => LOAD_MAP_VALUE,
            None => LOAD_MAP,
        },
        immediate: maps[usize::from(relocation.map)],
        ..Instruction::from(code[at])
    };
    let second = Instruction {
        // Less than the size of a value, which is small.
        immediate: relocation.offset.unwrap_or(0) as i32,
        ..Instruction::default()
    };
    code[at] = load.into();
    code[at + 1] = second.into();
}

/// The stub under construction. Forward jumps and calls are filled in at the end.
#[derive(Default)]
struct Stub {
    instructions: Vec<Instruction>,
    /// Jumps to the end.
    to_end: Vec<usize>,
    calls_predicate: Option<usize>,
    calls_handler: Option<usize>,
    /// Jumps to where the stub continues with the manager.
    to_manager: Option<usize>,
}

impl Stub {
    fn push(&mut self, opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) {
        self.instructions.push(Instruction {
            opcode,
            destination,
            source,
            offset,
            immediate,
        });
    }

    fn load_map(&mut self, register: u8, map: i32) {
        self.push(opcode::LOAD_IMM64, register, LOAD_MAP, 0, map);
        self.instructions.push(Instruction::default());
    }

    fn help(&mut self, helper: i32) {
        self.push(opcode::CALL, 0, CALL_HELPER, 0, helper);
    }

    /// Loads the address of a map's only entry into a register.
    fn find(&mut self, map: i32, register: u8) {
        self.push(opcode::STORE_IMM32, FRAME, 0, -4, 0);
        self.push(opcode::MOV64, 2, FRAME, 0, 0);
        self.push(opcode::ADD64_IMM, 2, 0, 0, -4);
        self.load_map(1, map);
        self.help(MAP_LOOKUP);
        self.to_end.push(self.instructions.len());
        self.push(opcode::JUMP_IF_ZERO, 0, 0, 0, 0);
        self.push(opcode::MOV64, register, 0, 0, 0);
    }

    fn enter(&mut self, environment: &Environment, direction: Direction) {
        let views = match direction {
            Direction::Receive => environment.views,
            Direction::Send => environment.sendings,
        };
        self.push(opcode::MOV64, PACKET, 1, 0, 0);
        self.find(environment.work, WORK);
        self.find(views, VIEW);
        self.push(opcode::STORE_IMM32, WORK, 0, RUN_IS_SKIPPED, 0);
    }

    /// Calls a function with the view. All other argument registers were clobbered by the previous
    /// call.
    fn call(&mut self) -> usize {
        self.push(opcode::MOV64, 1, VIEW, 0, 0);
        self.push(opcode::CALL, 0, CALL_FUNCTION, 0, 0);
        self.instructions.len() - 1
    }

    fn ask_predicate(&mut self) {
        self.calls_predicate = Some(self.call());
        self.push(opcode::JUMP_IF_NOT_ZERO32, 0, 0, 2, 0);
        self.push(opcode::STORE_IMM32, WORK, 0, RUN_IS_SKIPPED, 1);
        self.to_manager = Some(self.instructions.len());
        self.push(opcode::JUMP, 0, 0, 0, 0);
    }

    fn run_handler(&mut self) {
        self.calls_handler = Some(self.call());
        self.push(opcode::STORE32, WORK, 0, RUN_VERDICT, 0);
        self.help(TIME);
        self.push(opcode::STORE64, WORK, 0, RUN_ENDED, 0);
    }

    fn go_on(&mut self, environment: &Environment, direction: Direction) {
        let manager = match direction {
            Direction::Receive => MANAGER_APPLY,
            Direction::Send => MANAGER_APPLY_SENT,
        };
        let here = self.instructions.len();
        if let Some(at) = self.to_manager {
            self.instructions[at].offset = distance(at, here);
        }
        self.push(opcode::MOV64, 1, PACKET, 0, 0);
        self.load_map(2, environment.managers);
        self.push(opcode::MOV64_IMM, 3, 0, 0, manager as i32);
        self.help(TAIL_CALL);
    }

    fn finish(mut self, code: &Code) -> Vec<u64> {
        let end = self.instructions.len();
        for at in std::mem::take(&mut self.to_end) {
            self.instructions[at].offset = distance(at, end);
        }
        self.push(opcode::MOV64_IMM, 0, 0, 0, TC_ACT_SHOT);
        self.push(opcode::EXIT, 0, 0, 0, 0);
        let length = self.instructions.len();
        let calls = [
            (self.calls_predicate, code.predicate),
            (self.calls_handler, Some(code.handler)),
        ];
        for (call, function) in calls {
            if let (Some(at), Some(function)) = (call, function) {
                // Both values are a few thousand at most.
                let distance = length + function as usize - at - 1;
                self.instructions[at].immediate = distance as i32;
            }
        }
        self.instructions.into_iter().map(u64::from).collect()
    }
}

/// Distance of a jump within the stub, which is short.
fn distance(from: usize, to: usize) -> i16 {
    (to - from - 1) as i16
}
