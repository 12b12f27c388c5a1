//! A policy is parsed, or refused with the line that is wrong.

use super::*;
use crate::config::Config;

fn policies(text: &str) -> Result<Vec<Policy>, String> {
    let config: Result<Config, _> = toml::from_str(text);
    config
        .map(|config| config.qos.policy)
        .map_err(|error| error.to_string())
}

fn refused(text: &str) -> String {
    policies(text).unwrap_err()
}

#[test]
fn every_key_of_a_policy_can_be_set() {
    let policies = policies(
        "[[qos.policy]]
         user = 'root'
         transmit = { rate = '20mbit', burst = '64k', ceiling = '50mbit', device = 'eth0' }
         receive = { packets = 10000, bits = '100mbit', burst = '50ms', priority = 3 }
         [[qos.policy]]
         program = '/usr/bin/vlc'
         user = 'root'
         cpu = { rate = '30%', period = '33ms', class = 'video', slack = true, adapt = '0.1-0.5' }
         [qos.policy.transmit]
         slice = '4ms'
         period = '100ms'
         slack = true",
    )
    .unwrap();
    assert_eq!(policies[0].whom, Whom::Scope(Scope::User { uid: 0 }));
    let transmit = policies[0].transmit.as_ref().unwrap();
    assert_eq!(transmit.rate, Rate::Bits(20_000_000));
    assert_eq!(transmit.slack, Slack::UpTo(50_000_000));
    assert_eq!(policies[0].receive.as_ref().unwrap().burst_ms, 50);
    let cpu = policies[1].cpu.as_ref().unwrap();
    assert_eq!((cpu.rate_ppm, cpu.period_us), (300_000, 33_000));
    let program = Whom::Program {
        path: "/usr/bin/vlc".into(),
        uid: Some(0),
    };
    assert_eq!(policies[1].whom, program);
    let slice = Rate::Slice {
        slice_us: 4_000,
        period_us: 100_000,
    };
    assert_eq!(policies[1].transmit.as_ref().unwrap().rate, slice);
}

#[test]
fn ports_and_cgroups_have_policies() {
    let whom = |key: &str| {
        let text = format!("[[qos.policy]]\n{key}\nreceive.packets = 5");
        policies(&text).map(|policies| policies[0].whom.clone())
    };
    let port = Scope::Port {
        protocol: portolan_types::Protocol::Udp,
        port: 53,
    };
    assert_eq!(whom("port = 'udp:53'"), Ok(Whom::Scope(port)));
    let cgroup = Scope::Cgroup("/a.slice".into());
    assert_eq!(whom("cgroup = '/a.slice'"), Ok(Whom::Scope(cgroup)));
    assert_eq!(
        whom("user = '33'"),
        Ok(Whom::Scope(Scope::User { uid: 33 }))
    );
}

#[test]
fn a_wrong_policy_is_refused_by_its_key() {
    let policy = "[[qos.policy]]\nuser = 'root'\n";
    for (text, named) in [
        ("transmit.rate = '20mbps'", "rate"),
        ("transmit.rate = 20", "rate"),
        ("transmit.burst = '1g'", "burst"),
        ("transmit = { rate = '1mbit', slice = '1ms' }", "`slice`"),
        ("transmit.slice = '1ms'", "`period`"),
        (
            "transmit = { rate = '1mbit', ceiling = '2mbit', slack = true }",
            "`ceiling`",
        ),
        ("transmit = { rate = '1mbit', color = 'red' }", "color"),
        ("receive = {}", "`packets`"),
        ("receive.packets = -1", "packets"),
        ("receive.priority = 300", "priority"),
        ("program = '/a'\ncpu.period = '33ms'", "`rate`"),
        ("cpu = { rate = '0.3', adapt = 'often' }", "adapt"),
        ("", "`transmit`"),
        ("port = 'udp:53'\nreceive.packets = 5", "`port`"),
        ("program = 'vlc'\ncpu.rate = '0.1'", "`program`"),
        ("pid = 5\ncpu.rate = '0.1'", "pid"),
    ] {
        let message = refused(&format!("{policy}{text}"));
        assert!(message.contains(named), "{text}: {message}");
        assert!(message.contains("line"), "{text}: {message}");
    }
}

#[test]
fn a_port_has_no_cpu_time() {
    let message = refused("[[qos.policy]]\nport = 'udp:53'\ncpu.rate = '0.1'");
    assert!(message.contains("`cpu` is for a `user`"), "{message}");
}

#[test]
fn a_user_that_is_not_there_is_refused() {
    let message = refused("[[qos.policy]]\nuser = 'nosuchuser'\nreceive.packets = 5");
    assert!(message.contains("nosuchuser"), "{message}");
}

fn check(text: &str) -> Result<Vec<LinkConfig>, String> {
    let config: Config = toml::from_str(text).map_err(|error| error.to_string())?;
    config.check().map_err(|error| error.to_string())?;
    Ok(config.qos.link)
}

fn with_link(keys: &str) -> Result<Vec<LinkConfig>, String> {
    check(&format!(
        "interfaces = ['eth0']\n[[qos.link]]\ndevice = 'eth0'\n{keys}"
    ))
}

#[test]
fn a_link_has_defaults_and_every_key_can_be_set() {
    let defaults = LinkConfig {
        per_user: 50,
        ..LinkConfig::usual("eth0")
    };
    assert_eq!(with_link("").unwrap(), [defaults]);
    assert_eq!(with_link("per_user = 0").unwrap()[0].per_user, 0);
    let keys = "rate = '2.5gbit'\nreservable = 50\nper_user = 100\nreplace = true";
    let expected = LinkConfig {
        device: "eth0".into(),
        rate: Some(2_500_000_000),
        reservable: 50,
        per_user: 100,
        replace: true,
    };
    assert_eq!(with_link(keys).unwrap(), [expected]);
}

#[test]
fn a_link_that_makes_no_sense_is_refused() {
    for (keys, said) in [
        ("rate = '10 mbit'", "10 mbit"),
        ("rate = '999kbit'", "below 1 Mbit"),
        ("reservable = 100", "`reservable`"),
        ("reservable = 0", "`reservable`"),
        ("per_user = 101", "`per_user`"),
        ("speed = 5", "speed"),
        ("[[qos.link]]\ndevice = 'eth0'", "named twice"),
    ] {
        let error = with_link(keys).unwrap_err();
        assert!(error.contains(said), "{keys}: {error}");
    }
    let elsewhere = check("interfaces = ['eth0']\n[[qos.link]]\ndevice = 'eth1'").unwrap_err();
    assert!(elsewhere.contains("not a managed interface"), "{elsewhere}");
}
