//! `portolan status`: the server's state.

use portolan_proto::control::{ReplyBody, RequestBody};
use portolan_proto::report::{FilterReport, StatusReport};
use schemars::JsonSchema;
use serde::Serialize;

use crate::ServerAddress;
use crate::exit::{Failure, print};
use crate::json::print_json;
use crate::server::unexpected;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub server: ServerAddress,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

pub(crate) fn status(arguments: &Arguments) -> Result<(), Failure> {
    let ReplyBody::Status(status) = arguments.server.ask(RequestBody::ReadStatus)? else {
        return Err(unexpected());
    };
    if arguments.json {
        print_json(&StatusView::from(&status))?;
    } else {
        print(describe(&status))?;
    }
    if status.faults.is_empty() {
        Ok(())
    } else {
        Err(Failure::Shown)
    }
}

/// The server's state.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct StatusView {
    pub version: String,
    /// The newest that the server speaks, in hexadecimal. Libraries must speak one in common with it.
    pub protocol: String,
    pub pid: u32,
    /// The configuration file.
    pub config: Option<String>,
    pub interfaces: Vec<String>,
    pub processes: u32,
    pub sessions: u32,
    /// Sessions with a ring of their own.
    pub direct: u32,
    pub uptime_s: u64,
    pub filter: FilterView,
    /// New sockets are the kernel's, because the host has netfilter or policy rules.
    pub obeys_policy: bool,
    /// Present faults, one sentence each.
    pub faults: Vec<String>,
}

/// How the packet filter works, and its run time while the kernel counted it.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct FilterView {
    pub algorithm: String,
    pub runs: u64,
    pub nanoseconds: u64,
    pub driver_hooks: Vec<DriverHookView>,
}

/// The packet filter in a device's driver.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct DriverHookView {
    pub interface: String,
    /// `native`, `generic`, or `none` with the reason.
    pub state: String,
}

impl From<&StatusReport> for StatusView {
    fn from(status: &StatusReport) -> StatusView {
        let hooks = status
            .filter
            .driver_hooks
            .iter()
            .map(|hook| DriverHookView {
                interface: hook.interface.clone(),
                state: hook.state.clone(),
            });
        StatusView {
            version: status.version.clone(),
            protocol: format!("{:08x}", status.protocol),
            pid: status.pid,
            config: status.config.clone(),
            interfaces: status.interfaces.clone(),
            processes: status.processes,
            sessions: status.sessions,
            direct: status.direct,
            uptime_s: status.uptime_s,
            filter: FilterView {
                algorithm: status.filter.algorithm.clone(),
                runs: status.filter.runs,
                nanoseconds: status.filter.nanoseconds,
                driver_hooks: hooks.collect(),
            },
            obeys_policy: status.obeys_policy,
            faults: status.faults.clone(),
        }
    }
}

fn describe(status: &StatusReport) -> String {
    let faults = status.faults.iter();
    let text = describe_server(status) + describe_policy(status);
    faults.fold(text, |text, fault| format!("{text}\nfault       {fault}"))
}

fn describe_server(status: &StatusReport) -> String {
    format!(
        "portoland {}, protocol {:08x}, pid {}, up {}\ninterfaces  {}\nprocesses   {}\nsessions    {}\nfilter      {}",
        status.version,
        status.protocol,
        status.pid,
        duration(status.uptime_s),
        status.interfaces.join(" "),
        status.processes,
        describe_sessions(status),
        describe_filter(&status.filter),
    )
}

fn describe_policy(status: &StatusReport) -> &'static str {
    if status.obeys_policy {
        "\npolicy      the host has netfilter or policy rules: new sockets are the kernel's"
    } else {
        ""
    }
}

fn describe_sessions(status: &StatusReport) -> String {
    match status.direct {
        0 => status.sessions.to_string(),
        direct => format!("{}, {direct} with a ring of its own", status.sessions),
    }
}

/// Shows the run time only if the kernel counts it, and drivers only where a filter in them is configured.
fn describe_filter(filter: &FilterReport) -> String {
    let hooks = filter.driver_hooks.iter();
    hooks.fold(describe_algorithm(filter), |text, hook| {
        format!("{text}\nin driver   {}: {}", hook.interface, hook.state)
    })
}

fn describe_algorithm(filter: &FilterReport) -> String {
    match filter.nanoseconds.checked_div(filter.runs) {
        Some(mean) => format!("{}, {mean} ns per packet", filter.algorithm),
        None => filter.algorithm.clone(),
    }
}

fn duration(seconds: u64) -> String {
    let (hours, minutes) = (seconds / 3600, seconds / 60 % 60);
    format!("{hours}:{minutes:02}:{:02}", seconds % 60)
}

#[cfg(test)]
mod tests {
    use portolan_proto::report::DriverHookReport;

    use super::*;

    #[test]
    fn a_status_fits_a_glance() {
        let status = StatusReport {
            version: "0.1.0 (1a2b)".into(),
            protocol: 7,
            pid: 7,
            config: None,
            interfaces: vec!["eth0".into(), "eth1".into()],
            processes: 2,
            sessions: 3,
            direct: 1,
            uptime_s: 3_725,
            filter: FilterReport {
                algorithm: "hash".into(),
                runs: 0,
                nanoseconds: 0,
                driver_hooks: Vec::new(),
            },
            obeys_policy: true,
            faults: vec!["device eth1 is gone".into()],
            times: Default::default(),
        };
        assert_eq!(
            describe(&status),
            "portoland 0.1.0 (1a2b), protocol 00000007, pid 7, up 1:02:05\ninterfaces  eth0 eth1\nprocesses   2\nsessions    3, 1 with a ring of its own\n\
             filter      hash\n\
             policy      the host has netfilter or policy rules: new sockets are the kernel's\n\
             fault       device eth1 is gone"
        );
    }

    #[test]
    fn what_the_filter_takes_is_shown_where_it_is_counted() {
        let filter = FilterReport {
            algorithm: "linear".into(),
            runs: 10,
            nanoseconds: 2_509,
            driver_hooks: Vec::new(),
        };
        assert_eq!(describe_filter(&filter), "linear, 250 ns per packet");
    }

    #[test]
    fn drivers_that_are_to_have_the_filter_are_shown() {
        let hook = |interface: &str, state: &str| DriverHookReport {
            interface: interface.into(),
            state: state.into(),
        };
        let filter = FilterReport {
            algorithm: "hash".into(),
            runs: 0,
            nanoseconds: 0,
            driver_hooks: vec![hook("eth0", "native"), hook("eth1", "none: why")],
        };
        assert_eq!(
            describe_filter(&filter),
            "hash\nin driver   eth0: native\nin driver   eth1: none: why"
        );
    }
}
