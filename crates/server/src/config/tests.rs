//! A wrong configuration is refused with a message that names the error.

use portolan_bpf::DriverHook;

use super::*;

fn parse(text: &str) -> Result<Config, String> {
    toml::from_str(text).map_err(|error| error.to_string())
}

fn refused(text: &str) -> String {
    parse(text).unwrap().check().unwrap_err().to_string()
}

#[test]
fn the_defaults_need_only_an_interface() {
    assert!(matches!(
        Config::default().check(),
        Err(ConfigError::NoInterface)
    ));
    parse("interfaces = ['eth0']").unwrap().check().unwrap();
}

#[test]
fn an_unknown_key_is_refused_by_name() {
    assert!(parse("colour = 'blue'").unwrap_err().contains("colour"));
    assert!(parse("[limits]\nmagic = 1").unwrap_err().contains("magic"));
}

#[test]
fn no_rule_gives_away_what_the_host_lives_by() {
    let rule = |text: &str| format!("interfaces = ['eth0']\n[[raw]]\nuser = '7'\n{text}");
    parse(&rule("ethertypes = [0x88b5]\nprotocols = [253]"))
        .unwrap()
        .check()
        .unwrap();
    assert!(refused(&rule("ethertypes = [0x0806]")).contains("ethertype 0x0806"));
    assert!(refused(&rule("protocols = [6]")).contains("ip protocol 6"));
    let nobody = "[[raw]]\nuser = 'no such user'";
    assert!(parse(nobody).unwrap_err().contains("no such user"));
}

#[test]
fn limits_have_ranges() {
    let limits = |text: &str| format!("interfaces = ['eth0']\n[limits]\n{text}");
    parse(&limits("root_reserve = 0")).unwrap().check().unwrap();
    assert!(refused(&limits("root_reserve = 91")).contains("root_reserve 91"));
    for (key, most) in [
        ("sessions", "262144"),
        ("bindings", "1048576"),
        ("orphan_memory", "1048576"),
        ("turn_us", "1000000"),
        ("time_share", "100"),
    ] {
        let message = refused(&limits(&format!("{key} = 0")));
        assert!(message.contains(&format!("{key} must be between 1 and {most}")));
    }
}

#[test]
fn every_key_can_be_set() {
    let config = parse(
        "interfaces = ['eth0', 'eth1']
         socket = '/tmp/control'
         socket_mode = 0o660
         socket_group = 'portolan'
         ephemeral_ports = [10000, 10999]
         ring_size = 1048576
         spin_us = 50
         congestion = 'bbr'
         ecn = 'request'
         [buffers]
         send_initial = 65536
         send_maximum = 131072
         receive_initial = 65536
         receive_maximum = 131072
         [limits]
         processes = 4
         processes_per_user = 2
         sessions_per_process = 100
         time_wait = 10
         root_reserve = 5
         connections_per_user = 10
         sessions = 1000
         sessions_per_user = 500
         bindings = 100
         bindings_per_user = 50
         shared_ports = 20
         shared_ports_per_user = 10
         orphans = 100
         orphans_per_user = 50
         orphan_memory = 64
         orphan_memory_per_user = 16
         orphan_seconds = 30
         relay_memory = 64
         relay_memory_per_user = 16
         turn_us = 1000
         time_share = 50
         [filter]
         algorithm = 'linear'
         [demux]
         active = true
         marker = 7
         [delivery]
         form = 'ipc'
         [[qos.cpu_class]]
         name = 'hard'
         share = 0.25
         [[qos.cpu_class]]
         name = 'soft'
         share = 0.5
         overbooking = 'unbounded'
         each_user = 1
         [[qos.policy]]
         user = 'root'
         cpu = { rate = '0.1' }
         [[qos.policy]]
         cgroup = '/video'
         cpu = { rate = '0.1' }",
    )
    .unwrap();
    config.check().unwrap();
    assert_eq!(config.socket_mode, 0o660);
    assert_eq!(config.parameters().spin_us, 50);
    assert_eq!(config.limits.processes, 4);
    let classes = config.cpu_classes();
    assert_eq!(classes[0].share_ppm, 250_000);
    assert_eq!(classes[1].each_user_ppm, 1_000_000);
}

#[test]
fn wrong_values_are_refused_by_name() {
    let eth0 = "interfaces = ['eth0']\n";
    for (text, named) in [
        ("ring_size = 5000000", "ring_size"),
        ("ring_size = 4096", "ring_size"),
        ("ring_size = 131072", "ring_size"),
        ("[delivery]\ndirect_ring_size = 131072", "direct_ring_size"),
        ("ephemeral_ports = [300, 400]", "ephemeral_ports"),
        ("ephemeral_ports = [9000, 8000]", "ephemeral_ports"),
        ("congestion = 'bbr9'", "bbr9"),
        ("ecn = 'perhaps'", "perhaps"),
        ("socket_mode = 0o4777", "socket_mode"),
        ("[buffers]\nsend_initial = 1", "buffers"),
        ("[limits]\nprocesses = 0", "processes"),
        ("[[qos.cpu_class]]\nname = 'a'\nshare = 0", "share"),
        ("[[qos.cpu_class]]\nname = 'a'\nshare = nan", "share"),
        ("[[qos.cpu_class]]\nname = ''\nshare = 1", "name"),
        (
            "[[qos.cpu_class]]\nname = 'a'\nshare = 1\n[[qos.cpu_class]]\nname = 'b'\nshare = 0.1",
            "add up",
        ),
        (
            "[[qos.cpu_class]]\nname = 'a'\nshare = 1\noverbooking = 'much'",
            "overbooking",
        ),
    ] {
        let message = refused(&format!("{eth0}{text}"));
        assert!(message.contains(named), "{text}: {message}");
    }
    assert!(refused("interfaces = ['a', 'a']").contains("twice"));
}

#[test]
fn a_missing_file_is_named() {
    let error = Config::read(Path::new("/nonexistent/portolan.toml")).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/portolan.toml"));
}

#[test]
fn no_text_makes_the_reader_panic_and_what_passes_is_within_bounds() {
    const KEYS: [&str; 12] = [
        "interfaces = ['e",
        "socket_mode = ",
        "ephemeral_ports = [",
        "ring_size = ",
        "spin_us = ",
        "congestion = '",
        "[buffers]\n",
        "send_maximum = ",
        "[limits]\n",
        "processes = ",
        "time_wait = ",
        "]",
    ];
    portolan_fuzz::check!(1000)
        .with_type::<Vec<(u8, u32, char)>>()
        .for_each(|words| {
            let mut text = String::from("interfaces = ['eth0']\n");
            for (key, number, other) in words.iter().take(12) {
                text.push_str(KEYS.get(usize::from(key % 16)).copied().unwrap_or("\n"));
                match key >> 6 {
                    0 => text.push(*other),
                    1 => text.push_str("']\n"),
                    _ => text.push_str(&format!("{number}\n")),
                }
            }
            if let Ok(config) = parse(&text)
                && config.check().is_ok()
            {
                assert!(config.ring_size.is_power_of_two());
                let [first, last] = config.ephemeral_ports;
                assert!(first <= last && first >= FIRST_UNPRIVILEGED_PORT);
                assert!(config.limits.processes > 0);
                config.parameters();
            }
        });
}

#[test]
fn an_unknown_algorithm_is_refused_with_those_that_exist() {
    let error = parse("[filter]\nalgorithm = 'tree'").unwrap_err();
    assert!(
        error.contains("tree") && error.contains("linear"),
        "{error}"
    );
}

#[test]
fn only_a_code_point_for_local_use_marks_handles() {
    // Best effort, expedited forwarding, none at all.
    for marker in [0, 46, 67] {
        let text = format!("interfaces = ['eth0']\n[demux]\nmarker = {marker}");
        assert!(refused(&text).contains("demux.marker"), "{marker}");
    }
}

#[test]
fn a_filter_in_the_driver_is_wished_by_the_form_or_by_itself() {
    let hooks = |text| parse(text).unwrap().delivery.xdp();
    assert!(hooks("").is_empty());
    let both = [DriverHook::Native, DriverHook::Generic];
    assert_eq!(hooks("[delivery]\nform = 'shm-ipf'"), both);
    assert_eq!(hooks("[delivery]\nxdp = 'any'"), both);
    let generic = [DriverHook::Generic];
    assert_eq!(
        hooks("[delivery]\nform = 'shm-ipf'\nxdp = 'generic'"),
        generic
    );
    let error = refused("interfaces = ['eth0']\n[delivery]\nform = 'shm-ipf'\nxdp = 'off'");
    assert!(error.contains("delivery.xdp"), "{error}");
}

#[test]
fn a_file_without_end_is_refused() {
    let error = Config::read(Path::new("/dev/zero")).unwrap_err();
    assert!(error.to_string().contains("longer than"), "{error}");
    assert!(Config::read(Path::new("/")).is_err());
}

/// The file that the package installs as /etc/portoland.toml.
#[test]
fn the_packages_file_shows_the_defaults() {
    const FILE: &str = include_str!("../../../../contrib/portoland.toml");
    assert_eq!(parse(FILE).unwrap(), Config::default());
    let shown: Vec<&str> = FILE
        .lines()
        .filter_map(|line| line.strip_prefix('#'))
        .filter(|line| !line.starts_with(' '))
        .collect();
    let config = Config {
        // These have no default that could be shown.
        interfaces: Vec::new(),
        socket_group: None,
        spin_us: None,
        ecn: None,
        ..parse(&shown.join("\n")).unwrap()
    };
    assert_eq!(config, Config::default());
}
