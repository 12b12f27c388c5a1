//! Admission, linkage and order of extensions. The kernel verifier's verdict on linked programs is
//! tested by the server's hostile tests.

use portolan_proto::extension::layout::{CHAIN_MAX, Chain, GuardKey};
use portolan_proto::extension::{Code, Direction, MapDefinition, MapKind, Relocation};
use portolan_types::ChannelId;

use super::{Domain, Environment, Fault, Full, Instruction, Table, TableEntry, check, link};

const DOMAIN: Domain = Domain {
    helpers: &[1, 5],
    instructions: 64,
    maps: 2,
    entries: 16,
    key: 8,
    value: 64,
    memory: 8192,
    processors: 2,
};

const ENVIRONMENT: Environment = Environment {
    work: 11,
    views: 12,
    sendings: 14,
    managers: 13,
};

fn op(opcode: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> u64 {
    Instruction {
        opcode,
        destination,
        source,
        offset,
        immediate,
    }
    .into()
}

const EXIT: u64 = 0x95;

fn code(instructions: &[u64]) -> Code {
    Code {
        instructions: instructions.to_vec(),
        ..Code::default()
    }
}

fn map(kind: MapKind) -> MapDefinition {
    MapDefinition {
        name: "m".to_owned(),
        kind,
        key: 4,
        value: 8,
        entries: 1,
        contents: Vec::new(),
        is_constant: false,
    }
}

fn fault(code: &Code) -> Fault {
    check(code, &DOMAIN).expect_err("it is refused")
}

#[test]
fn an_instruction_is_read_as_it_is_written() {
    portolan_fuzz::check!(500)
        .with_type::<u64>()
        .for_each(|word| {
            assert_eq!(u64::from(Instruction::from(*word)), *word);
        });
}

#[test]
fn every_kind_of_instruction_of_a_compiler_is_admitted() {
    let instructions = [
        op(0xb7, 0, 0, 0, 2),
        op(0xbf, 6, 1, 0, 0),
        op(0x61, 2, 1, 8, 0),
        op(0x91, 2, 1, 8, 0),
        op(0x7a, 10, 0, -8, 0),
        op(0x7b, 10, 2, -8, 0),
        op(0xdb, 10, 2, -8, 1),
        op(0xc3, 10, 2, -8, 0xf1),
        op(0xd4, 2, 0, 0, 16),
        op(0x1d, 0, 2, 1, 0),
        op(0x06, 0, 0, 0, 0),
        op(0x85, 0, 0, 0, 5),
        op(0x85, 0, 1, 0, 0),
        EXIT,
    ];
    assert_eq!(check(&code(&instructions), &DOMAIN), Ok(0));
}

#[test]
fn what_is_not_in_the_domain_is_named() {
    let refused = [
        (op(0x85, 0, 0, 0, 12), Fault::Helper(0, 12)),
        (op(0x85, 0, 0, 0, -1), Fault::Helper(0, -1)),
        (op(0x85, 0, 2, 0, 1), Fault::KernelFunction(0)),
        (op(0x85, 0, 1, 0, 1), Fault::Target(0)),
        (op(0x05, 0, 0, -2, 0), Fault::Target(0)),
        (op(0x05, 0, 0, 1, 0), Fault::Target(0)),
        (op(0x06, 0, 0, 0, i32::MIN), Fault::Target(0)),
        (op(0x30, 0, 0, 0, 0), Fault::Opcode(0, 0x30)),
        (op(0x8d, 1, 0, 0, 0), Fault::Opcode(0, 0x8d)),
        (op(0xe5, 0, 0, 0, 0), Fault::Opcode(0, 0xe5)),
        (op(0xdb, 1, 2, 0, 0x100), Fault::Opcode(0, 0xdb)),
        (op(0xcb, 1, 2, 0, 0), Fault::Opcode(0, 0xcb)),
        (op(0xe7, 1, 2, 0, 0), Fault::Opcode(0, 0xe7)),
        (op(0xb7, 11, 0, 0, 0), Fault::Register(0)),
        (op(0xbf, 0, 15, 0, 0), Fault::Register(0)),
        (op(0x18, 1, 1, 0, 3), Fault::Foreign(0)),
    ];
    for (word, expected) in refused {
        assert_eq!(fault(&code(&[word, EXIT])), expected, "{word:#x}");
    }
}

#[test]
fn no_code_makes_admission_panic_and_what_it_admits_links() {
    portolan_fuzz::check!(2000)
        .with_type::<(Vec<u64>, u32, Option<u32>, Vec<(u32, u16, Option<u32>)>)>()
        .for_each(|(instructions, handler, predicate, relocations)| {
            let relocation = |&(instruction, map, offset): &(u32, u16, Option<u32>)| Relocation {
                instruction,
                map,
                offset,
            };
            let code = Code {
                direction: Direction::default(),
                instructions: instructions.clone(),
                handler: handler % 4,
                predicate: predicate.map(|at| at % 4),
                maps: vec![map(MapKind::Array)],
                relocations: relocations.iter().map(relocation).collect(),
            };
            if check(&code, &DOMAIN).is_ok() {
                let program = link(&code, &[3], &ENVIRONMENT);
                assert!(program.len() > code.instructions.len());
            }
        });
}

#[test]
fn a_stub_calls_the_handler_and_goes_on_to_the_manager() {
    let program = link(&code(&[op(0xb7, 0, 0, 0, 2), EXIT]), &[], &ENVIRONMENT);
    let start = program.len() - 2;
    let instructions: Vec<Instruction> = program.iter().map(|&word| word.into()).collect();
    let calls: Vec<usize> = (0..start)
        .filter(|&at| instructions[at].opcode == 0x85 && instructions[at].source == 1)
        .collect();
    let [call] = calls[..] else {
        panic!("{calls:?}");
    };
    assert_eq!(call as i32 + 1 + instructions[call].immediate, start as i32);
    // The view is its only argument.
    assert_eq!(program[call - 1], op(0xbf, 1, 8, 0, 0));
    let loads = |map| {
        instructions
            .iter()
            .filter(move |i| i.opcode == 0x18 && i.immediate == map)
    };
    for map in [11, 12, 13] {
        assert_eq!(loads(map).count(), 1, "{map}");
    }
}

#[test]
fn relocations_put_the_extensions_own_maps_in() {
    let load = op(0x18, 1, 0, 0, 99);
    let code = Code {
        maps: vec![map(MapKind::Hash), map(MapKind::Array)],
        relocations: vec![
            Relocation {
                instruction: 0,
                map: 0,
                offset: None,
            },
            Relocation {
                instruction: 2,
                map: 1,
                offset: Some(4),
            },
        ],
        ..code(&[load, 0, load, 0, EXIT])
    };
    assert!(check(&code, &DOMAIN).is_ok());
    let program = link(&code, &[71, 72], &ENVIRONMENT);
    let end = &program[program.len() - 5..];
    assert_eq!(end[..2], [op(0x18, 1, 1, 0, 71), 0]);
    assert_eq!(end[2..4], [op(0x18, 1, 2, 0, 72), op(0, 0, 0, 0, 4)]);
}

#[test]
fn relocations_lead_from_loads_to_values_that_there_are() {
    let relocated = |instruction, map_number, offset| Code {
        maps: vec![map(MapKind::Hash), map(MapKind::Array)],
        relocations: vec![Relocation {
            instruction,
            map: map_number,
            offset,
        }],
        ..code(&[op(0x18, 1, 0, 0, 0), 0, EXIT])
    };
    assert!(check(&relocated(0, 0, None), &DOMAIN).is_ok());
    for (instruction, map, offset) in [
        (1, 0, None),
        (2, 0, None),
        (9, 0, None),
        (0, 2, None),
        (0, 0, Some(0)),
        (0, 1, Some(8)),
    ] {
        let code = relocated(instruction, map, offset);
        assert_eq!(fault(&code), Fault::Relocation(0), "{code:?}");
    }
}

#[test]
fn maps_are_of_bounded_shapes() {
    let with = |map: MapDefinition| Code {
        maps: vec![map],
        ..code(&[EXIT])
    };
    let array = || map(MapKind::Array);
    let unsound = [
        MapDefinition {
            entries: 0,
            ..array()
        },
        MapDefinition {
            entries: 17,
            ..array()
        },
        MapDefinition { key: 8, ..array() },
        MapDefinition {
            key: 0,
            ..map(MapKind::Hash)
        },
        MapDefinition {
            value: 65,
            ..map(MapKind::Hash)
        },
        MapDefinition {
            contents: vec![0; 9],
            ..array()
        },
        MapDefinition {
            contents: vec![0],
            ..map(MapKind::Hash)
        },
        MapDefinition {
            is_constant: true,
            ..map(MapKind::LruHash)
        },
        map(MapKind::Ring),
    ];
    for map in unsound {
        assert!(
            matches!(fault(&with(map.clone())), Fault::Map(..)),
            "{map:?}"
        );
    }
    let ring = MapDefinition {
        key: 0,
        value: 0,
        entries: 16_384,
        ..map(MapKind::Ring)
    };
    assert_eq!(fault(&with(ring)), Fault::Memory(16_384, 8192));
}

fn entry(owner: u32, port: u8, priority: u8) -> TableEntry {
    TableEntry {
        owner: ChannelId(owner),
        uid: owner,
        keys: vec![key(owner, port)],
        priority,
    }
}

fn key(channel: u32, port: u8) -> GuardKey {
    GuardKey {
        channel,
        port: [0, port],
        protocol: 17,
        event: 1,
    }
}

fn numbers(chain: Option<Chain>) -> Vec<u16> {
    chain.map_or(vec![], |chain| {
        chain.numbers[..chain.count as usize].to_vec()
    })
}

#[test]
fn a_chain_is_in_the_order_of_priority_and_then_of_coming() {
    let mut table = Table::default();
    for priority in [5, 1, 5, 9, 1] {
        table.enter(entry(1, 7, priority)).unwrap();
    }
    assert_eq!(numbers(table.chain(&key(1, 7))), [2, 5, 1, 3, 4]);
    table.remove(1);
    assert_eq!(table.suspend(5), Some(vec![key(1, 7)]));
    assert_eq!(numbers(table.chain(&key(1, 7))), [2, 3, 4]);
    assert!(table.entry(5).is_some());
    assert_eq!(numbers(table.chain(&key(1, 8))), []);
}

#[test]
fn numbers_come_again_as_late_as_possible() {
    let mut table = Table::default();
    for round in 0..1000_u16 {
        let number = table.enter(entry(1, 7, 0)).unwrap();
        assert_eq!(number, 1 + round % 255);
        table.remove(number);
    }
}

#[test]
fn chains_processes_and_users_are_bounded() {
    let mut table = Table::default();
    for _ in 0..CHAIN_MAX {
        table.enter(entry(1, 7, 0)).unwrap();
    }
    assert_eq!(table.enter(entry(1, 7, 0)), Err(Full::Chain));
    for port in 0..8 {
        table.enter(entry(1, 10 + port, 0)).unwrap();
    }
    assert_eq!(
        table.enter(entry(1, 9, 0)),
        Err(Full::Process(Table::PER_PROCESS))
    );
    let of_user = |owner| TableEntry {
        uid: 1000,
        ..entry(owner, 7, 0)
    };
    for owner in 100..100 + Table::PER_USER as u32 {
        table.enter(of_user(owner)).unwrap();
    }
    assert_eq!(table.enter(of_user(999)), Err(Full::User(Table::PER_USER)));
}
