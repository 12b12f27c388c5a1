//! `portolan qos show`, `classes` and `group list`: tables of reservations and classes.

use portolan_proto::qos::text::{show_bytes, show_duration, show_rate, show_share};
use portolan_proto::qos::{
    ClassTraffic, CpuForm, CpuReport, GroupOptions, GroupReport, LinkReport, QosReport, RateKept,
    Scope, TransmitReport,
};
use portolan_sys::accounts;

use super::Arguments;
use super::report::QosView;
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::table::{lines, printable};

pub(crate) fn everything(arguments: &Arguments) -> Result<(), Failure> {
    show(arguments, |report| {
        vec![
            links(report),
            transmit(report),
            group_table(report),
            budgets(report),
            processors(report),
        ]
    })
}

pub(crate) fn classes(arguments: &Arguments) -> Result<(), Failure> {
    show(arguments, |report| {
        vec![link_classes(report), cpu_classes(report)]
    })
}

pub(crate) fn groups(arguments: &Arguments) -> Result<(), Failure> {
    show(arguments, |report| vec![group_table(report)])
}

fn show(
    arguments: &Arguments,
    tables: impl FnOnce(&QosReport) -> Vec<Vec<String>>,
) -> Result<(), Failure> {
    let report = arguments.server.guarantees()?;
    if arguments.json {
        return print_json(&QosView::from(&report));
    }
    print_tables(tables(&report))
}

/// Prints the tables that have rows below their head.
pub(crate) fn print_tables(tables: Vec<Vec<String>>) -> Result<(), Failure> {
    let full: Vec<_> = tables.into_iter().filter(|lines| lines.len() > 1).collect();
    if full.is_empty() {
        return print("nothing is reserved");
    }
    let texts: Vec<_> = full.iter().map(|lines| lines.join("\n")).collect();
    print(texts.join("\n\n"))
}

fn links(report: &QosReport) -> Vec<String> {
    let row = |link: &LinkReport| {
        vec![
            printable(&link.device),
            if link.gone {
                "gone".to_owned()
            } else {
                link.rate.map_or_else(unknown, show_rate)
            },
            show_rate(link.reservable),
            show_rate(link.reserved),
            link.replaced.as_deref().map_or_else(nothing, printable),
        ]
    };
    let rows: Vec<_> = report.links.iter().map(row).collect();
    lines(
        &["Link", "Rate", "Reservable", "Reserved", "Replaced"],
        &rows,
    )
}

fn transmit(report: &QosReport) -> Vec<String> {
    let row = |entry: &TransmitReport| {
        vec![
            scope(&entry.scope),
            printable(&entry.device),
            class(entry.class),
            show_rate(entry.rate),
            show_rate(entry.ceiling),
            show_bytes(entry.burst),
            kept(entry.kept),
            entry.group.map_or_else(nothing, |key| key.to_string()),
            user(entry.uid),
        ]
    };
    let rows: Vec<_> = report.transmit.iter().map(row).collect();
    let head = [
        "Transmit", "Dev", "Class", "Rate", "Ceil", "Burst", "Kept", "Group", "By",
    ];
    lines(&head, &rows)
}

fn group_table(report: &QosReport) -> Vec<String> {
    let row = |group: &GroupReport| {
        vec![
            group.key.to_string(),
            printable(&group.device),
            class(group.class),
            show_rate(group.rate),
            show_rate(group.reserved),
            kept(group.kept),
            format!("{:04o}", group.mode),
            options(group.options),
            user(group.uid),
        ]
    };
    let rows: Vec<_> = report.groups.iter().map(row).collect();
    let head = [
        "Group", "Dev", "Class", "Rate", "Reserved", "Kept", "Mode", "Options", "By",
    ];
    lines(&head, &rows)
}

fn budgets(report: &QosReport) -> Vec<String> {
    let rows: Vec<_> = report
        .receive
        .iter()
        .map(|entry| {
            let spec = &entry.spec;
            vec![
                scope(&entry.scope),
                spec.packets
                    .map_or_else(nothing, |packets| packets.to_string()),
                spec.bits.map_or_else(nothing, show_rate),
                format!("{}ms", spec.burst_ms),
                spec.priority
                    .map_or_else(nothing, |priority| priority.to_string()),
                entry.passed.to_string(),
                entry.dropped.to_string(),
                entry.early.to_string(),
                user(entry.uid),
            ]
        })
        .collect();
    let head = [
        "Receive",
        "Packets/s",
        "Bits/s",
        "Burst",
        "Prio",
        "Passed",
        "Dropped",
        "Early",
        "By",
    ];
    lines(&head, &rows)
}

/// A line below a reservation states why its form is a weaker one.
fn processors(report: &QosReport) -> Vec<String> {
    let rows: Vec<_> = report.cpu.iter().map(processor).collect();
    let head = [
        "CPU",
        "Class",
        "Rate",
        "Effective",
        "Period",
        "Used",
        "Overruns",
        "Adapt",
        "Proposed",
        "Form",
        "By",
    ];
    let mut table = lines(&head, &rows).into_iter();
    let mut all: Vec<_> = table.next().into_iter().collect();
    for (line, entry) in table.zip(&report.cpu) {
        all.push(line);
        if let CpuForm::Weaker { reason, .. } = &entry.form {
            all.push(format!("\t {}", printable(reason)));
        }
    }
    all
}

fn processor(entry: &CpuReport) -> Vec<String> {
    let share = |ppm: u32| show_share(ppm.into());
    vec![
        scope(&entry.scope),
        entry.spec.class.as_deref().map_or_else(nothing, printable),
        share(entry.spec.rate_ppm),
        share(entry.effective_ppm),
        show_duration(entry.spec.period_us),
        share(entry.used_ppm),
        entry.overruns.to_string(),
        entry.spec.adapt.to_string(),
        entry.proposed_ppm.map_or_else(nothing, share),
        printable(&entry.form.to_string()),
        user(entry.uid),
    ]
}

fn link_classes(report: &QosReport) -> Vec<String> {
    let best_effort = report.links.iter().map(|link| {
        let none = [nothing(), nothing(), nothing()];
        class_row(
            &link.device,
            "best effort".to_owned(),
            none,
            link.best_effort,
        )
    });
    let groups = report.groups.iter().map(|group| {
        let terms = [class(group.class), show_rate(group.rate), nothing()];
        class_row(
            &group.device,
            format!("group {}", group.key),
            terms,
            group.traffic,
        )
    });
    let flows = report.transmit.iter().map(|entry| {
        let terms = [
            class(entry.class),
            show_rate(entry.rate),
            show_rate(entry.ceiling),
        ];
        class_row(&entry.device, scope(&entry.scope), terms, entry.traffic)
    });
    let rows: Vec<_> = best_effort.chain(groups).chain(flows).collect();
    let head = [
        "Dev", "Class", "For", "Rate", "Ceil", "Bytes", "Packets", "Drops", "Backlog",
    ];
    lines(&head, &rows)
}

fn class_row(
    device: &str,
    whom: String,
    [class, rate, ceiling]: [String; 3],
    traffic: ClassTraffic,
) -> Vec<String> {
    let counts = [
        traffic.bytes,
        traffic.packets,
        traffic.drops,
        traffic.backlog.into(),
    ];
    [printable(device), class, whom, rate, ceiling]
        .into_iter()
        .chain(counts.map(|count| count.to_string()))
        .collect()
}

fn cpu_classes(report: &QosReport) -> Vec<String> {
    let elsewhere = (report.cpu_elsewhere_ppm > 0).then(|| {
        vec![
            "(other servers)".to_owned(),
            nothing(),
            nothing(),
            show_share(report.cpu_elsewhere_ppm),
            nothing(),
        ]
    });
    let rows: Vec<_> = report
        .cpu_classes
        .iter()
        .map(|class| {
            vec![
                printable(&class.name),
                show_share(class.rate_ppm),
                class
                    .overbooking_ppm
                    .map_or_else(|| "any".to_owned(), show_share),
                show_share(class.nominal_ppm),
                class.members.to_string(),
            ]
        })
        .chain(elsewhere)
        .collect();
    lines(
        &["CPU-Class", "Rate", "Overbooking", "Nominal", "Members"],
        &rows,
    )
}

pub(crate) fn scope(scope: &Scope) -> String {
    match scope {
        Scope::User { uid } => format!("user {}", user(*uid)),
        scope => printable(&scope.to_string()),
    }
}

/// Formats how much of a rate is kept on the link in its present state.
fn kept(kept: RateKept) -> String {
    match kept {
        RateKept::Full => "yes".to_owned(),
        RateKept::Scaled { bits } => show_rate(bits),
        RateKept::Suspended => "no".to_owned(),
    }
}

/// Formats a minor number as `tc class show` prints it.
pub(crate) fn class(minor: u16) -> String {
    format!("{minor:x}")
}

fn user(uid: u32) -> String {
    accounts::name_of(uid).map_or_else(|| uid.to_string(), |name| printable(&name))
}

fn options(options: GroupOptions) -> String {
    let named = [
        (options.share, "share"),
        (options.slack, "slack"),
        (options.keep, "keep"),
    ];
    let set: Vec<_> = named
        .iter()
        .filter(|(set, _)| *set)
        .map(|(_, name)| *name)
        .collect();
    if set.is_empty() {
        return nothing();
    }
    set.join(",")
}

pub(crate) fn nothing() -> String {
    "-".to_owned()
}

fn unknown() -> String {
    "unknown".to_owned()
}

#[cfg(test)]
pub(crate) mod tests;
