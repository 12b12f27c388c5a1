//! Lists of extensions and of their statistics.

use portolan_proto::extension::{Event, ExtensionReport};

use schemars::JsonSchema;
use serde::Serialize;

use super::{Arguments, CostView};
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::table::{lines, printable};

pub(super) fn list(arguments: &Arguments, extensions: &[ExtensionReport]) -> Result<(), Failure> {
    if arguments.json {
        let list: Vec<_> = extensions.iter().map(identity).collect();
        return print_json(&list);
    }
    let row = |extension: &ExtensionReport| {
        vec![
            extension.number.to_string(),
            printable(&extension.name),
            extension.event.name().to_owned(),
            ports(extension),
            extension.priority.to_string(),
            extension.pid.to_string(),
            extension.uid.to_string(),
            extension.placement.name().to_owned(),
            extension.standing.name().to_owned(),
        ]
    };
    let rows: Vec<_> = extensions.iter().map(row).collect();
    let head = [
        "Number",
        "Name",
        "Event",
        "Ports",
        "Priority",
        "Pid",
        "Uid",
        "Placement",
        "State",
    ];
    show(&head, &rows)
}

pub(super) fn statistics(
    arguments: &Arguments,
    extensions: &[ExtensionReport],
    number: Option<u16>,
) -> Result<(), Failure> {
    let is_meant = |one: &&ExtensionReport| number.is_none_or(|number| number == one.number);
    let extensions: Vec<_> = extensions.iter().filter(is_meant).collect();
    if let (Some(number), true) = (number, extensions.is_empty()) {
        return Err(Failure::Refused(format!("you have no extension {number}")));
    }
    if arguments.json {
        let list: Vec<_> = extensions.into_iter().map(details).collect();
        return print_json(&list);
    }
    let row = |extension: &&ExtensionReport| {
        let counted = &extension.statistics;
        let numbers = [
            counted.runs,
            mean(extension),
            counted.longest,
            extension.limit,
            counted.overruns,
            counted.passed,
            counted.consumed,
            counted.replied,
            counted.forwarded,
            counted.replaced,
            counted.copied,
            counted.delivered,
            counted.refused,
            counted.skipped,
        ];
        let names = [
            extension.number.to_string(),
            printable(&extension.name),
            extension.placement.name().to_owned(),
        ];
        names
            .into_iter()
            .chain(numbers.map(|number| number.to_string()))
            .collect()
    };
    let rows: Vec<_> = extensions.iter().map(row).collect();
    let head = [
        "Number",
        "Name",
        "Placement",
        "Runs",
        "Mean-ns",
        "Longest-ns",
        "Limit-ns",
        "Overruns",
        "Passed",
        "Consumed",
        "Replied",
        "Forwarded",
        "Replaced",
        "Copied",
        "Delivered",
        "Refused",
        "Skipped",
    ];
    show(&head, &rows)
}

fn show(head: &[&str], rows: &[Vec<String>]) -> Result<(), Failure> {
    for line in lines(head, rows) {
        print(line)?;
    }
    Ok(())
}

fn ports(extension: &ExtensionReport) -> String {
    let shown = |number: &u16| match extension.event {
        Event::EthernetReceive | Event::EthernetSend => format!("{number:#06x}"),
        _ => number.to_string(),
    };
    let ports: Vec<String> = extension.ports.iter().map(shown).collect();
    ports.join(",")
}

fn mean(extension: &ExtensionReport) -> u64 {
    let counted = &extension.statistics;
    counted.time.checked_div(counted.runs).unwrap_or(0)
}

/// An extension that is installed.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ExtensionView {
    pub number: u16,
    pub name: String,
    pub event: &'static str,
    pub ports: Vec<u16>,
    pub priority: u8,
    pub pid: u32,
    pub uid: u32,
    pub placement: &'static str,
    pub state: &'static str,
    pub cost: CostView,
}

fn identity(extension: &ExtensionReport) -> ExtensionView {
    ExtensionView {
        number: extension.number,
        name: extension.name.clone(),
        event: extension.event.name(),
        ports: extension.ports.clone(),
        priority: extension.priority,
        pid: extension.pid,
        uid: extension.uid,
        placement: extension.placement.name(),
        state: extension.standing.name(),
        cost: extension.cost.into(),
    }
}

/// Statistics of an extension.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StatisticsView {
    pub number: u16,
    pub name: String,
    pub placement: &'static str,
    pub runs: u64,
    pub mean_ns: u64,
    pub longest_ns: u64,
    pub limit_ns: u64,
    pub overruns: u64,
    pub passed: u64,
    pub consumed: u64,
    pub replied: u64,
    pub forwarded: u64,
    pub replaced: u64,
    pub copied: u64,
    pub delivered: u64,
    pub refused: u64,
    pub skipped: u64,
}

fn details(extension: &ExtensionReport) -> StatisticsView {
    let counted = &extension.statistics;
    StatisticsView {
        number: extension.number,
        name: extension.name.clone(),
        placement: extension.placement.name(),
        runs: counted.runs,
        mean_ns: mean(extension),
        longest_ns: counted.longest,
        limit_ns: extension.limit,
        overruns: counted.overruns,
        passed: counted.passed,
        consumed: counted.consumed,
        replied: counted.replied,
        forwarded: counted.forwarded,
        replaced: counted.replaced,
        copied: counted.copied,
        delivered: counted.delivered,
        refused: counted.refused,
        skipped: counted.skipped,
    }
}
