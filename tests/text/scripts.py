"""Real texts in many scripts, cut and joined by a seed: what models write, and how users paste."""

from __future__ import annotations

import random

SENTENCES = [
    "All human beings are born free and equal in dignity and rights.",
    "Tous les êtres humains naissent libres et égaux en dignité et en droits.",
    "Alle Menschen sind frei und gleich an Würde und Rechten geboren; daß heißt: ALLE!",
    "Todos los seres humanos nacen libres e iguales en dignidad y derechos. ¿Verdad?",
    "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw.",
    "Všichni lidé rodí se svobodní a sobě rovní co do důstojnosti a práv.",
    "Tất cả mọi người sinh ra đều được tự do và bình đẳng về nhân phẩm và quyền.",
    "Bütün insanlar hür, haysiyet ve haklar bakımından eşit doğarlar. İstanbul'da ığdır.",
    "Все люди рождаются свободными и равными в своём достоинстве и правах.",
    "Всі люди народжуються вільними і рівними у своїй гідності та правах.",
    "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια.",
    "Բոլոր մարդիկ ծնվում են ազատ ու հավասար իրենց արժանապատվությամբ։",
    "ყველა ადამიანი იბადება თავისუფალი და თანასწორი თავისი ღირსებით.",
    "כל בני האדם נולדו בני חורין ושווים בערכם ובזכויותיהם.",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق.",
    "تمام انسان آزاد اور حقوق و عزت کے اعتبار سے برابر پیدا ہوئے ہیں۔",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "সমস্ত মানুষ স্বাধীনভাবে সমান মর্যাদা এবং অধিকার নিয়ে জন্মগ্রহণ করে।",
    "ਸਾਰੇ ਮਨੁੱਖ ਆਜ਼ਾਦ ਅਤੇ ਬਰਾਬਰ ਪੈਦਾ ਹੁੰਦੇ ਹਨ।",
    "மனிதப் பிறிவியினர் சகலரும் சுதந்திரமாகவே பிறக்கின்றனர்.",
    "ప్రతిపత్తిస్వత్వముల విషయమున మానవులెల్లరును జన్మతః స్వతంత్రులు.",
    "ಎಲ್ಲಾ ಮಾನವರೂ ಸ್ವತಂತ್ರರಾಗಿಯೇ ಜನಿಸಿದ್ದಾರೆ.",
    "മനുഷ്യരെല്ലാവരും തുല്യാവകാശങ്ങളോടെ ജനിച്ചവരാണ്.",
    "සියලු මනුෂ්‍යයෝ නිදහස්ව උපත ලබා ඇත.",
    "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกัน",
    "ມະນຸດທຸກຄົນເກີດມາມີສິດເສລີພາບ",
    "လူတိုင်းသည် တူညီ လွတ်လပ်သော ဂုဏ်သိက္ခာဖြင့် မွေးဖွားလာသူများ ဖြစ်သည်။",
    "មនុស្សទាំងអស់ កើតមកមានសេរីភាព និងសមភាព។",
    "འགྲོ་བ་མིའི་རིགས་རྒྱུད་ཡོངས་ལ་སྐྱེས་ཙམ་ཉིད་ནས་ཆེ་མཐོངས།",
    "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。",
    "人人生而自由，在尊嚴和權利上一律平等。",
    "すべての人間は、生れながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.",
    "ሰብዓዊ ፍጡር ሁሉ ሲወለድ ነጻና በክብርና በመብትም እኩልነት ያለው ነው።",
    "ᎠᏂᏍᎦᏯ ᎨᏥᏁᎳ, ᏣᎳᎩ.",
    "\U00010330\U00010331\U00010332 \U000103a0\U000103a1 \U00012000\U00012001",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f44d\U0001f3fd!",
    "\U0001f1eb\U0001f1f7\U0001f1ef\U0001f1f5 \u2764\ufe0f 1\ufe0f\u20e3",
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",
    "e\u0301 vs \u00e9, n\u0303; Z\u0351\u036b\u0343a\u0334l\u0337g\u0336o\u0335",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β → ∑ᵢ₌₁ⁿ √i ≈ 3.14 × 10⁻⁸ ± 5 %",
    "def f(x: int) -> str:\n\treturn f'{x!r:>8}'  # it's 100 %\n\n\n    pass\r\n",
    '{"a": [1, 2.5e-3, null, true], "b\\n": "\\u00e9 <b>&amp;</b>"}',
    "| a | b |\n|---|---|\n| 1 | `x` |\n\n- [ ] **bold** _it_ ~~no~~ — “quotes” … ‘ok’",
    "https://example.com/a%20b?c=d&e=f#g user@example.com C:\\dir\\file.txt /usr/bin",
    "I'm sure , they 've said it 's fine . Isn't it ? Do n't ! You 're ' right '",
    "1234567890 3.14159 v2.0 0x1F 1,000,000 12:30 2026-11-30 +49 (0)30 123",
    "   leading, trailing   and    inner spaces \u00a0nbsp\u2003em\u200bzero\ufeffbom   ",
    "ﬁ ﬂ Ⅷ ① ｆｕｌｌ ﾊﾝｶｸ ㌔ Ǆ",
]


def real_texts(count: int, seed: int = 0) -> list[str]:
    """Whole sentences first, then pieces of several, cut at any code point."""
    generator = random.Random(seed)
    texts = list(SENTENCES)
    while len(texts) < count:
        parts = []
        for sentence in generator.sample(SENTENCES, generator.randrange(1, 5)):
            start = generator.randrange(len(sentence))
            parts.append(sentence[start : start + generator.randrange(1, 60)])
        texts.append(generator.choice(["", " ", "\n", "  ", ", "]).join(parts))
    return texts[:count]
